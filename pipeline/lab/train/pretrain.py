"""`cairn pretrain`: an encoder on text alone, by masked words over layers and widths (m³BERT).

    texts ─▶ tokens ─▶ rows, some held out ─▶ masked ─▶ steps of the one trainer ─▶ model/ and best/

    loss    Σ over layers and widths of the masked words' cross entropy (m³BERT §2.1, L_total)

Of the chosen tokens 80 % become [MASK], 10 % another word, and 10 % stay as they are; [CLS] and landmarks are
never chosen. Each term is already divided by the batch's number of scored tokens, so terms of micro-batches
add up. The output table is the input table (tied), behind it a bias that begins at the words' frequency.

Source: Devlin et al. 2019 (BERT), §3.1; m³BERT §2.3 takes its 15 %.

    N tokens    K scored tokens
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.gradients import summed_backward
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder, autocast, resolved
from cairn.pipeline.lab.train.losses import vocabulary_loss
from cairn.pipeline.lab.train.packed_rows import own_places, split
from cairn.pipeline.lab.train.pairs import read_texts
from cairn.pipeline.lab.train.settings import PretrainConfig, require_exits
from cairn.pipeline.lab.train.token_stream import TokenStream
from cairn.pipeline.lab.train.trainer import RunReport, Score, Trainer, TrainingBatch, claimed_folder
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.precision import default_device
from cairn.pipeline.model.engine.weights import NewTensors
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.first_layers import LAYER_COUNTS
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32, Int64
from torch import nn


def new_checkpoint(config: Mapping[str, Any], tokenizer_of: Checkpoint, *, seed: int = 0) -> Checkpoint:
    """Return weights drawn from ``seed`` for a configuration, behind the tokenizer of another model.

    ``vocab_size`` may be left out. A configuration that no family reads raises :class:`ModelError`, a
    vocabulary smaller than the tokenizer's :class:`ConfigError`.
    """
    num_tokens = tokenizer_of.tokenizer.get_vocab_size()
    config = {"vocab_size": num_tokens, "pad_token_id": tokenizer_of.pad_id, **config}
    described = replace(tokenizer_of, config=config)
    tensors = NewTensors(described.integer(*LAYER_COUNTS), torch.Generator().manual_seed(seed))
    checkpoint = replace(
        described,
        tensors=tensors,
        steps=(),
        extra_path=None,
        fingerprint=fingerprint(
            kind="new weights",
            config=dict(sorted(config.items())),
            seed=seed,
            tokenizer=tokenizer_of.fingerprint,
        ),
    )
    reader_of(config.get("model_type"))(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    if checkpoint.integer("vocab_size") < num_tokens:
        raise ConfigError(
            f"vocab_size of a new model must be at least the tokenizer's {num_tokens}, got "
            f"{config['vocab_size']}; leave it out"
        )
    return replace(checkpoint, tensors=dict(tensors))


AS_MASK, AS_ANOTHER = 0.8, 0.1
_MASK_TOKENS: Final = ("[MASK]", "<mask>", "<|mask|>")


class Vocabulary(NamedTuple):
    """The id of the mask, and the ids of words, which special tokens are none of."""

    mask_id: int
    word_ids: Int64[np.ndarray, " W"]


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """Return them; a tokenizer without a mask raises :class:`ModelError`."""
    tokenizer = checkpoint.tokenizer
    found = (tokenizer.token_to_id(name) for name in _MASK_TOKENS)
    mask_id = next((token_id for token_id in found if token_id is not None), None)
    if mask_id is None:
        raise ModelError(
            f"pretraining must mask tokens, got a tokenizer without {' or '.join(_MASK_TOKENS)}; choose "
            "another base"
        )
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return Vocabulary(mask_id, np.setdiff1d(np.arange(tokenizer.get_vocab_size()), list(special)))


def masked(
    rows: Rows, share: float, vocabulary: Vocabulary, generator: np.random.Generator
) -> tuple[Rows, Int64[np.ndarray, " K"]]:
    """Return rows with a share of their words hidden, and the positions, one at least, that are scored."""
    words = own_places(rows)
    num_chosen = max(1, round(share * len(words)))
    chosen_K = np.sort(generator.choice(words, num_chosen, replace=False))
    fate_K = generator.random(num_chosen)
    ids_N = rows.ids.copy()
    ids_N[chosen_K[fate_K < AS_MASK]] = vocabulary.mask_id
    others = chosen_K[(fate_K >= AS_MASK) & (fate_K < AS_MASK + AS_ANOTHER)]
    ids_N[others] = generator.choice(vocabulary.word_ids, len(others))
    return replace(rows, ids=ids_N), chosen_K


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedPart:
    """A micro-batch: the rows as the encoder reads them, the ids that were there, and which are asked for.

    ``num_scored`` is the whole batch's.
    """

    rows: Rows
    ids_N: Int64[np.ndarray, " N"]
    scored_K: Int64[np.ndarray, " K"]
    num_scored: int


Terms = Mapping[str, Float32[torch.Tensor, ""]]
"""Terms of the loss by name; those with a slash are parts of another, for the log."""


def pretrain_terms(
    model: LandmarkEncoder, bias_V: Float32[torch.Tensor, " V"], part: MaskedPart, config: PretrainConfig
) -> Terms:
    """Return the loss of masked words over all layers and widths, and that of each exit."""
    layers = config.matryoshka_layers or (model.num_layers,)
    widths = config.matryoshka_dims or (model.model_dim,)
    states = model.states(part.rows, layers=layers)
    scored_K = torch.from_numpy(part.scored_K).to(model.device)
    total, sums_LW = vocabulary_loss(
        torch.stack([states[layer][scored_K] for layer in layers]),
        model.token_table,
        bias_V,
        torch.from_numpy(part.ids_N[part.scored_K]).to(model.device),
        widths,
        distillation_weight=config.distillation_weight,
    )
    terms = {"mlm": total / part.num_scored}
    for row, layer in enumerate(layers):
        for column, width in enumerate(widths):
            terms[f"mlm/{layer}/{width}"] = sums_LW[row, column] / part.num_scored
    return terms


_MASKS, _HELD_OUT = 15, 17
"""What is drawn, as part of its seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedText:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for rows of text."""

    model: LandmarkEncoder
    bias_V: nn.Parameter
    stream: TokenStream
    vocabulary: Vocabulary
    config: PretrainConfig
    folder: EncoderFolder

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`Objective`; ``terms`` of the report are those of the loss by name."""
        plain = self.stream.batch(step)
        parts = self._parts(plain, np.random.default_rng([self.config.seed, _MASKS, step]))
        terms: Counter[str] = Counter()

        def loss_of(part: MaskedPart) -> torch.Tensor:
            found = self._terms(part)
            terms.update({name: term.item() for name, term in found.items()})
            return found["mlm"]

        return TrainingBatch(
            backward=partial(summed_backward, [partial(loss_of, part) for part in parts]),
            report=lambda: {
                "num_tokens": len(plain.ids),
                "num_scored": parts[0].num_scored,
                "terms": dict(terms),
            },
        )

    @torch.no_grad()
    def score(self) -> Score | None:
        """See :class:`Objective`: the loss of the held-out rows, the lowest of which is the best."""
        if not self.stream.heldout:
            return None
        generator = np.random.default_rng([self.config.seed, _HELD_OUT])
        plain = self.stream.lay_out(self.stream.heldout, generator)
        terms: Counter[str] = Counter()
        for part in self._parts(plain, generator):
            terms.update({name: term.item() for name, term in self._terms(part).items()})
        loss = terms["mlm"]
        return Score(measures={"heldout_loss": loss, "heldout_terms": dict(terms)}, value=-loss)

    def _parts(self, plain: Rows, generator: np.random.Generator) -> Sequence[MaskedPart]:
        """Mask the rows and cut them into micro-batches."""
        hidden, scored = masked(plain, self.config.mask_share, self.vocabulary, generator)
        parts: list[MaskedPart] = []
        start = 0
        for rows in split(hidden, self.config.micro_batch_tokens):
            end = start + len(rows.ids)
            parts.append(
                MaskedPart(
                    rows=rows,
                    ids_N=plain.ids[start:end].astype(np.int64),
                    scored_K=scored[(scored >= start) & (scored < end)] - start,
                    num_scored=len(scored),
                )
            )
            start = end
        return parts

    def _terms(self, part: MaskedPart) -> Terms:
        with autocast(self.model, self.config):
            return pretrain_terms(self.model, self.bias_V, part, self.config)


def pretrain(
    sources: Sequence[Path],
    folder: Path,
    config: PretrainConfig,
    *,
    base: str,
    from_config: Path | None = None,
    deadline: float = math.inf,
    progress: ProgressListener = silent_progress,
) -> RunReport:
    """Pretrain ``base`` on the texts of ``sources``, or new weights that ``from_config`` describes.

    That is a config.json; new weights have the base's tokenizer.
    """
    if not sources:
        raise SourceError("pretraining must have texts, got none; name files")
    config = resolved(config)
    checkpoint = _base(base, from_config, config)
    model = LandmarkEncoder(checkpoint)
    _check_fit(config, checkpoint, model)
    vocabulary = vocabulary_of(checkpoint)
    texts = read_texts(sources)
    stream = TokenStream(texts, checkpoint, config, progress)
    counts_V = stream.word_counts(len(model.token_table)) + 1.0
    bias_V = nn.Parameter(torch.from_numpy(np.log(counts_V / counts_V.sum()).astype(np.float32)))
    model.objective = nn.ParameterDict({"bias": bias_V})  # trained, and left out of the saved model
    made_of = {"base": checkpoint.fingerprint, "texts": texts.fingerprint}
    objective = MaskedText(
        model=model.to(default_device()),
        bias_V=bias_V,
        stream=stream,
        vocabulary=vocabulary,
        config=config,
        folder=EncoderFolder(base=checkpoint, settings=_served_settings(config)),
    )
    with claimed_folder(folder, config, made_of, texts.skipped):
        report = Trainer(
            objective=objective, config=config, folder=folder, deadline=deadline, progress=progress
        ).run()
    best = report.best_score
    details: dict[str, float | None] = {
        "texts": len(texts.texts),
        "tokens": stream.num_tokens,
        "rows": stream.num_rows,
        "parameters": sum(tensor.numel() for tensor in model.published_tensors().values()),
        "best_loss": None if best is None else -best,
        "tokens_per_second": report.rate("num_tokens"),
    }
    return replace(report, skipped=texts.skipped, details=details)


def _base(base: str, from_config: Path | None, config: PretrainConfig) -> Checkpoint:
    """Return what training begins with; its configuration says which exits are trained."""
    checkpoint = read_checkpoint(model_folder(base))
    if from_config is not None:
        checkpoint = new_checkpoint(read_json(from_config), checkpoint, seed=config.seed)
    own: dict[str, Any] = {
        name: list(getattr(config, name))
        for name in ("matryoshka_layers", "matryoshka_dims")
        if getattr(config, name)
    }
    return replace(checkpoint, config={**checkpoint.config, **own})


def _check_fit(config: PretrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    require_exits(config.matryoshka_layers, config.matryoshka_dims, model.num_layers, model.model_dim)
    if config.max_tokens > model.max_positions:
        raise ConfigError(
            f"max_tokens must be at most the model's {model.max_positions} positions, got {config.max_tokens}"
        )
    if checkpoint.steps or any(name.startswith(OWN_PREFIXES) for name in checkpoint.tensors):
        raise ModelError(
            "pretraining must start from a transformer without dense layers, gates, a latent attention and a "
            "landmark mixer, whose parts would no longer fit; choose another base"
        )


def _served_settings(config: PretrainConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest: as its rows were read."""
    if not config.landmark_intervals:
        return EncoderConfig(pooling="mean", attention="chunk")
    return EncoderConfig(pooling="lmk", attention="full")
