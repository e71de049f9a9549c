"""`cairn pretrain`: an encoder on text alone, by masked words (m³BERT) and by RetroMAE's decoder.

    texts ─▶ tokens ─▶ rows, some held out ─▶ masked ─▶ steps of the one trainer ─▶ model/ and best/

    mlm        Σ over layers and widths of the masked words' cross entropy (m³BERT §2.1, L_total)
    retromae   the same, and that of every word as rebuilt from the text's vector (LMK §6.3)

Of the chosen tokens 80 % become [MASK], 10 % another word, and 10 % stay as they are; [CLS] and landmarks are
never chosen. Each term is already divided by the batch's number of scored tokens, so terms of micro-batches
add up. The output table is the input table (tied), behind it a bias that begins at the words' frequency.

RetroMAE's enhanced decoder is one layer that rebuilds every token of a text from the text's one vector h, the
mean of the landmarks' states, or [CLS]'s where a row has no landmarks:

    queries        h + p_i                     for every token i
    keys, values   h, e_1 + p_1 … e_n + p_n    e the input embeddings of the unmasked text
    token i sees   h, and a sample of the other tokens drawn for it alone; never itself

    x = norm(queries + attention);  states = norm(x + feed-forward(x))

What the decoder cannot see it must take from h: that is what trains h. It is left out of the saved model.

Source: Devlin et al. 2019 (BERT), §3.1; m³BERT §2.3 takes its 15 %, RetroMAE 30 % for its encoder. Xiao et
al. 2022 (RetroMAE), §3.2 and eq. 4-8; LMK §6.3 puts the landmarks' mean in the place of [CLS]. Differs:
embeddings are normed after their positions are added, as in that paper's code; positions are the decoder's
own, begun as the encoder's where that has any. [CLS] and landmarks are not rebuilt.

    P texts    N their tokens    K scored tokens    D model dim    H heads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.grad_cache import summed_backward
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, EncoderFolder, LandmarkEncoder, autocast
from cairn.pipeline.lab.train.losses import SelfDistillation, vocabulary_loss
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.settings import PretrainConfig, require_within
from cairn.pipeline.lab.train.token_stream import StreamRows, TokenStream
from cairn.pipeline.lab.train.trainer import Batch, Score, Trainer, claimed_folder, deadline_in, resolved
from cairn.pipeline.lab.train.training_files import read_texts
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.weights import INITIAL_STD, NewTensors
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER, OWN_PREFIXES
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float, Float32, Int64
from torch import nn


def new_checkpoint(config: Mapping[str, Any], tokenizer_of: Checkpoint, *, seed: int = 0) -> Checkpoint:
    """Return weights drawn from ``seed`` for a configuration, behind the tokenizer of another model.

    ``vocab_size`` may be left out. A configuration that no family reads raises :class:`ModelError`, a
    vocabulary smaller than the tokenizer's :class:`ConfigError`.
    """
    num_tokens = tokenizer_of.tokenizer.get_vocab_size()
    config = {"vocab_size": num_tokens, "pad_token_id": tokenizer_of.pad_id, **config}
    tensors = NewTensors(_num_layers(config), torch.Generator().manual_seed(seed))
    checkpoint = replace(
        tokenizer_of,
        config=config,
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


def _num_layers(config: Mapping[str, Any]) -> int:
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    if type(num_layers) is not int or num_layers < 1:
        raise ModelError(
            f"num_hidden_layers of a new model must be a whole number of at least 1, got {num_layers!r}"
        )
    return num_layers


class EnhancedDecoder(nn.Module):
    """The layer with its positions; new weights come from ``generator``."""

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        num_positions: int,
        generator: torch.Generator,
        positions_PD: Float[torch.Tensor, "P D"] | None = None,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.positions = nn.Parameter(torch.empty(num_positions + 1, model_dim))
        self.query, self.output = (nn.Linear(model_dim, model_dim) for _ in range(2))
        self.key_value = nn.Linear(model_dim, 2 * model_dim)
        self.up, self.down = nn.Linear(model_dim, 4 * model_dim), nn.Linear(4 * model_dim, model_dim)
        self.input_norm, self.attention_norm, self.output_norm = (nn.LayerNorm(model_dim) for _ in range(3))
        with torch.no_grad():
            for module in self.children():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, INITIAL_STD, generator=generator)
                    module.bias.zero_()
            self.positions.normal_(0.0, INITIAL_STD, generator=generator)
            if positions_PD is not None:
                num_taken = min(len(positions_PD), len(self.positions))
                self.positions[:num_taken] = positions_PD[:num_taken]

    def forward(
        self,
        sentence_PD: Float[torch.Tensor, "P D"],
        tokens_ND: Float[torch.Tensor, "N D"],
        lengths: Sequence[int],
        visible: Sequence[Bool[torch.Tensor, "_ _"]],
    ) -> Float[torch.Tensor, "N D"]:
        """Return the state of every token; ``visible`` says for each text which token sees which."""
        device = tokens_ND.device
        owner_N = torch.repeat_interleave(torch.tensor(lengths, device=device))
        place_N = torch.cat([torch.arange(1, length + 1, device=device) for length in lengths])
        positions_ND = self.positions[place_N]
        queries_ND = self.input_norm(sentence_PD[owner_N] + positions_ND)
        query_ND = self.query(queries_ND)
        of_sentence, of_tokens = (
            self.key_value(self.input_norm(x)) for x in (sentence_PD, tokens_ND + positions_ND)
        )
        mixed = [
            self._attend(query_nD, torch.cat([of_sentence[text, None], keys]), seen)
            for text, (query_nD, keys, seen) in enumerate(
                zip(query_ND.split(list(lengths)), of_tokens.split(list(lengths)), visible, strict=True)
            )
        ]
        x_ND = self.attention_norm(queries_ND + self.output(torch.cat(mixed)))
        return self.output_norm(x_ND + self.down(F.gelu(self.up(x_ND))))

    def _attend(
        self, query_nD: torch.Tensor, key_value: torch.Tensor, visible_nn: Bool[torch.Tensor, "_ _"]
    ) -> Float[torch.Tensor, "n D"]:
        query, key, value = (
            x.unflatten(-1, (self._num_heads, -1)).transpose(0, 1)
            for x in (query_nD, *key_value.chunk(2, dim=-1))
        )
        seen = F.pad(visible_nn, (1, 0), value=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1).flatten(1)


def sampled_visibility(
    num_tokens: int, hidden_share: float, generator: torch.Generator
) -> Bool[torch.Tensor, "_ _"]:
    """Draw for each token which others it sees: each with 1 - ``hidden_share``, itself never."""
    seen_nn = torch.rand(num_tokens, num_tokens, generator=generator) >= hidden_share
    return seen_nn.fill_diagonal_(fill_value=False)


def bottleneck(
    states_ND: Float[torch.Tensor, "N D"],
    lengths: Sequence[int],
    pooled: Sequence[Int64[torch.Tensor, " _"]],
) -> Float[torch.Tensor, "P D"]:
    """Return the mean of the states at each text's positions, which count within its row."""
    rows = states_ND.split(list(lengths))
    return torch.stack([row[places].mean(0) for row, places in zip(rows, pooled, strict=True)])


AS_MASK, AS_ANOTHER = 0.8, 0.1
_MASK_TOKENS: Final = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Vocabulary:
    """The id of the mask, and the ids of words, which special tokens are none of."""

    mask_id: int
    word_ids: Int64[np.ndarray, " W"]


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """Return them; a tokenizer without a mask raises :class:`ModelError`."""
    tokenizer = checkpoint.tokenizer
    mask_id = next(
        (found for name in _MASK_TOKENS if (found := tokenizer.token_to_id(name)) is not None), None
    )
    if mask_id is None:
        raise ModelError(
            f"pretraining must mask tokens, got a tokenizer without {' or '.join(_MASK_TOKENS)}; choose "
            "another base"
        )
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    words = np.setdiff1d(np.arange(tokenizer.get_vocab_size()), list(special))
    return Vocabulary(mask_id=mask_id, word_ids=words)


def masked(
    batch: StreamRows, share: float, vocabulary: Vocabulary, generator: np.random.Generator
) -> tuple[StreamRows, Int64[np.ndarray, " K"]]:
    """Return rows with a share of their words hidden, and the positions of those that are scored.

    Positions count the batch's tokens, and there is at least one.
    """
    words = np.flatnonzero(batch.is_text_N)
    num_chosen = max(1, round(share * len(words)))
    chosen_K = np.sort(generator.choice(words, num_chosen, replace=False))
    fate_K = generator.random(num_chosen)
    ids_N = batch.rows.ids_N.copy()
    ids_N[chosen_K[fate_K < AS_MASK]] = vocabulary.mask_id
    others = chosen_K[(fate_K >= AS_MASK) & (fate_K < AS_MASK + AS_ANOTHER)]
    ids_N[others] = generator.choice(vocabulary.word_ids, len(others))
    return replace(batch, rows=replace(batch.rows, ids_N=ids_N)), chosen_K


_DECODED: Final = 16
"""What decoders' samples are drawn with, as part of their seed."""


class PretrainHeads(nn.Module):
    """What is trained beside the encoder and left out of the saved model."""

    def __init__(self, bias_V: Float32[torch.Tensor, " V"], decoder: EnhancedDecoder | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias_V)
        self.decoder = decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedPart:
    """A micro-batch: the rows as they are and as the encoder reads them, and which tokens it is asked for.

    ``first`` numbers its first row in the batch; ``num_scored`` and ``num_words`` are the whole batch's.
    """

    plain: StreamRows
    hidden: StreamRows
    scored_K: Int64[np.ndarray, " K"]
    first: int
    step: int
    num_scored: int
    num_words: int


Terms = Mapping[str, Float32[torch.Tensor, ""]]
"""Terms of the loss by name; those with a slash are parts of another, for the log."""


def pretrain_terms(
    model: LandmarkEncoder, heads: PretrainHeads, part: MaskedPart, config: PretrainConfig
) -> Terms:
    """Return the loss of masked words over all layers and widths and, with a decoder, of all words."""
    layers = config.matryoshka_layers or (model.num_layers,)
    widths = config.matryoshka_dims or (model.model_dim,)
    states = model.states(part.hidden.rows, layers=layers, landmarks=False)
    scored_K = torch.from_numpy(part.scored_K).to(model.device)
    labels_K = torch.from_numpy(part.plain.rows.ids_N[part.scored_K].astype(np.int64)).to(model.device)
    distillation = SelfDistillation(
        weight=config.distillation_weight, temperature=config.distillation_temperature
    )
    total, sums_LW = vocabulary_loss(
        torch.stack([states[layer][scored_K] for layer in layers]),
        model.token_table,
        heads.bias,
        labels_K,
        widths,
        distillation=distillation if config.distillation_weight else None,
    )
    terms = {"mlm": total / part.num_scored}
    for row, layer in enumerate(layers):
        for column, width in enumerate(widths):
            terms[f"mlm/{layer}/{width}"] = sums_LW[row, column].detach() / part.num_scored
    if heads.decoder is not None:
        terms["decoder"] = _decoded(model, heads.decoder, heads.bias, states[layers[-1]], part, config)
    return terms


def _decoded(
    model: LandmarkEncoder,
    decoder: EnhancedDecoder,
    bias_V: torch.Tensor,
    states_ND: torch.Tensor,
    part: MaskedPart,
    config: PretrainConfig,
) -> Float32[torch.Tensor, ""]:
    """Return the loss of every word as rebuilt from its text's vector."""
    rows, is_text_N = part.plain.rows, part.plain.is_text_N
    has_text = np.split(is_text_N, np.cumsum(rows.lengths_B)[:-1])
    lengths = [int(marks.sum()) for marks in has_text]
    pooled = [torch.from_numpy(_pooled(marks, config)).to(model.device) for marks in has_text]
    sentence_PD = bottleneck(states_ND, rows.lengths_B.tolist(), pooled)
    words_N = torch.from_numpy(rows.ids_N[is_text_N].astype(np.int64)).to(model.device)
    visible: list[torch.Tensor] = []
    for row, length in enumerate(lengths, start=part.first):
        draws = decoder_draws(config.seed, part.step, row)
        visible.append(sampled_visibility(length, config.decoder_mask_share, draws).to(model.device))
    decoded_ND = decoder(sentence_PD, model.token_table[words_N], lengths, visible)
    total, _ = vocabulary_loss(decoded_ND[None], model.token_table, bias_V, words_N, (model.model_dim,))
    return total / part.num_words


def decoder_draws(seed: int, step: int, row: int) -> torch.Generator:
    """Return what a row's decoder sample is drawn with."""
    drawn = int(np.random.default_rng([seed, _DECODED, step, row]).integers(2**62))
    return torch.Generator().manual_seed(drawn)


def _pooled(is_text: np.ndarray, config: PretrainConfig) -> Int64[np.ndarray, " _"]:
    """Return where the text's vector is read: its landmarks, else the first token, which is [CLS]."""
    if not config.landmark_intervals and not is_text[0]:
        return np.zeros(1, np.int64)
    others = np.flatnonzero(~is_text)
    return others[others > 0]


_MASKS, _HELD_OUT = 15, 17
"""What is drawn, as part of its seed."""

HELD_OUT_STEP: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedText:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for rows of text."""

    model: LandmarkEncoder
    heads: PretrainHeads
    stream: TokenStream
    vocabulary: Vocabulary
    config: PretrainConfig
    folder: EncoderFolder
    processes: Processes = ALONE

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`; ``terms`` of the report are those of the loss by name."""
        plain = self.stream.batch(step)
        parts = self._parts(plain, step, np.random.default_rng([self.config.seed, _MASKS, step]))
        terms = Counter(dict.fromkeys(self._names(), 0.0))

        def loss_of(part: MaskedPart) -> torch.Tensor:
            found = self._terms(part)
            terms.update({name: term.item() for name, term in found.items()})
            return torch.stack([term for name, term in found.items() if "/" not in name]).sum()

        return Batch(
            backward=partial(summed_backward, [partial(loss_of, part) for part in parts]),
            report=lambda: {
                "num_tokens": len(plain.rows.ids_N),
                "num_scored": parts[0].num_scored,
                "terms": self._of_all(terms),
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
        for part in self._parts(plain, HELD_OUT_STEP, generator):
            terms.update({name: term.item() for name, term in self._terms(part).items()})
        loss = sum(value for name, value in terms.items() if "/" not in name)
        return Score(measures={"heldout_loss": loss, "heldout_terms": dict(terms)}, value=-loss)

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        self.folder.save(folder, self.model)

    def _parts(self, plain: StreamRows, step: int, generator: np.random.Generator) -> Sequence[MaskedPart]:
        """Mask the rows and cut them into micro-batches."""
        hidden, scored = masked(plain, self.config.masked, self.vocabulary, generator)
        most = min(self.config.micro_batch_tokens, -(-len(plain.rows.ids_N) // self.processes.size))
        parts: list[MaskedPart] = []
        first, start = 0, 0
        for whole, masked_part in zip(plain.split(most), hidden.split(most), strict=True):
            end = start + len(whole.rows.ids_N)
            parts.append(
                MaskedPart(
                    plain=whole,
                    hidden=masked_part,
                    scored_K=scored[(scored >= start) & (scored < end)] - start,
                    first=first,
                    step=step + 1,
                    num_scored=len(scored),
                    num_words=int(plain.is_text_N.sum()),
                )
            )
            first, start = first + len(whole.rows), end
        return parts

    def _terms(self, part: MaskedPart) -> Mapping[str, torch.Tensor]:
        with autocast(self.model, self.config):
            return pretrain_terms(self.model, self.heads, part, self.config)

    def _names(self) -> list[str]:
        """Return the terms that every process has, in order."""
        layers = self.config.matryoshka_layers or (self.model.num_layers,)
        widths = self.config.matryoshka_dims or (self.model.model_dim,)
        own = ["mlm"] if self.heads.decoder is None else ["mlm", "decoder"]
        return own + [f"mlm/{layer}/{width}" for layer in layers for width in widths]

    def _of_all(self, terms: Mapping[str, float]) -> dict[str, float]:
        """Return the terms of all processes' micro-batches."""
        if self.processes.size == 1:
            return dict(terms)
        values = torch.tensor(list(terms.values()), device=self.processes.device)
        self.processes.add_up(values)
        return dict(zip(terms, values.tolist(), strict=True))


SERVED_INTERVAL = 64
"""Landmark interval of the saved folder, ingest's own default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainReport:
    """What a run did; rates and ``seconds`` count the steps of this process alone.

    ``best_loss`` is of held-out rows; losses are None where nothing was held out, or no step was left to
    make.
    """

    folder: str
    texts: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens: int
    rows: int
    parameters: int
    steps: int
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_step: int
    seconds: float
    tokens_per_second: float


def pretrain(
    sources: Sequence[Path],
    folder: Path,
    config: PretrainConfig,
    *,
    base: str,
    from_config: Path | None = None,
    stop_after_seconds: float | None = None,
    processes: Processes = ALONE,
    progress: ProgressListener = silent_progress,
) -> PretrainReport:
    """Pretrain ``base`` on the texts of ``sources``, or new weights that ``from_config`` describes.

    That is a config.json; new weights have the base's tokenizer. After ``stop_after_seconds`` a checkpoint is
    written and :class:`TryAgainError` raised: the same call goes on.
    """
    deadline = deadline_in(stop_after_seconds)
    if not sources:
        raise SourceError("pretraining must have texts, got none; name Parquet or JSON-lines files")
    config = resolved(config, processes)
    checkpoint = _base(base, from_config, config)
    model = LandmarkEncoder(checkpoint)
    for name in OWN_NAMES:
        model.get_parameter(name).requires_grad_(False)
    _check_fit(config, checkpoint, model)
    vocabulary = vocabulary_of(checkpoint)
    texts = read_texts(sources)
    stream = TokenStream(texts, checkpoint, config, progress)
    model.objective = heads = _heads(model, stream, config)
    made_of = {"base": checkpoint.fingerprint, "texts": texts.fingerprint}
    objective = MaskedText(
        model=model.to(processes.device),
        heads=heads,
        stream=stream,
        vocabulary=vocabulary,
        config=config,
        folder=EncoderFolder(base=checkpoint, settings=_served_settings(config)),
        processes=processes,
    )
    with claimed_folder(folder, config, made_of, texts.skipped, processes):
        steps = Trainer(
            objective=objective,
            config=config,
            folder=folder,
            deadline=deadline,
            processes=processes,
            progress=progress,
        ).run()
    best = steps.state.best_score
    return PretrainReport(
        folder=str(folder),
        texts=len(texts.texts),
        skipped=texts.skipped,
        tokens=stream.num_tokens,
        rows=stream.num_rows,
        parameters=sum(tensor.numel() for tensor in model.published_tensors().values()),
        steps=config.steps,
        resumed_at=steps.resumed_at,
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        best_loss=None if best is None else -best,
        best_step=steps.state.best_step,
        seconds=steps.seconds,
        tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
    )


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
    require_within("matryoshka_dims", config.matryoshka_dims, model.model_dim)
    require_within("matryoshka_layers", config.matryoshka_layers, model.num_layers)
    if config.matryoshka_layers and config.matryoshka_layers[-1] != model.num_layers:
        raise ConfigError(
            f"matryoshka_layers must end with the model's last layer {model.num_layers}, got "
            f"{list(config.matryoshka_layers)}"
        )
    if config.max_tokens > model.max_positions:
        raise ConfigError(
            f"max_tokens must be at most the model's {model.max_positions} positions, got {config.max_tokens}"
        )
    if checkpoint.steps or any(
        name.startswith((LANDMARK_MIXER, *OWN_PREFIXES)) for name in checkpoint.tensors
    ):
        raise ModelError(
            "pretraining must start from a transformer without dense layers, gates, a latent attention and a "
            "landmark mixer, whose parts would no longer fit; choose another base"
        )


def _heads(model: LandmarkEncoder, stream: TokenStream, config: PretrainConfig) -> PretrainHeads:
    """Return the bias, begun at the logarithm of the words' frequency, and RetroMAE's decoder."""
    counts_V = stream.word_counts(len(model.token_table)) + 1.0
    bias_V = torch.from_numpy(np.log(counts_V / counts_V.sum()).astype(np.float32))
    decoder = None
    if config.objective == "retromae":
        generator = torch.Generator().manual_seed(config.seed)
        decoder = EnhancedDecoder(
            model.model_dim, model.num_heads, config.max_tokens, generator, model.position_table
        )
    return PretrainHeads(bias_V, decoder)


def _served_settings(config: PretrainConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest: as its rows were read."""
    if not config.landmark_intervals:
        return EncoderConfig(pooling="mean", attention="chunk")
    return EncoderConfig(pooling="lmk", attention="full", landmark_interval=SERVED_INTERVAL)
