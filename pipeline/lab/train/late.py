"""`cairn train-late`: a token projection for a base model whose weights stay as they are.

    pairs ─▶ without judged texts ─▶ batches of neighbours ─▶ token states, embedded once
      ─▶ steps ─▶ the best step on held-out batches ─▶ FOLDER/cairn_late.safetensors

A batch is so many pairs that follow one another in their source, each document once: mostly sections of one
page, which are each other's hard negatives. Sources give batches in proportion to the root of their number.
The projection begins at the principal directions of the states, the weights at the idf of their tokens in the
documents. Weights of tokens that no query holds stay there. FOLDER names its base, so ``--model FOLDER``
takes it as a model; the log stands beside it as ``FOLDER.jsonl``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline import durable
from cairn.pipeline.config import Backend, EncoderConfig, Precision
from cairn.pipeline.encode.encoder_fit import prefixes_of
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.token_states import TokenStates, embed_tokens
from cairn.pipeline.lab.train.grad_cache import summed_backward
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.pair_vectors import kept_arrays, mine_hard_negatives, pairs_fingerprint
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs, text_numbers
from cairn.pipeline.lab.train.settings import LateConfig
from cairn.pipeline.lab.train.token_head import (
    LateBatch,
    TokenHead,
    late_loss,
    max_sims,
    padded_places,
    pool_padded,
)
from cairn.pipeline.lab.train.trainer import (
    Batch,
    FrozenBaseRun,
    Score,
    claimed_folder,
    read_log,
    save_weights,
)
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import (
    CAIRN_SETTINGS_NAME,
    Base,
    base_of_folder,
    encoder_config,
    settings_of_a_folder,
)
from cairn.pipeline.model.folders.names import is_folder, model_folder
from cairn.pipeline.token_vectors.codes import pool_neighbours
from cairn.pipeline.token_vectors.max_sim import token_idf
from cairn.pipeline.token_vectors.projection import TokenProjection, save_token_projection
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float32, Int64

MIN_BATCHES = 2
MAX_SHARE = 0.95
"""What scores above this share of the positive's score is no mined negative (NV-Embed §4.1.1)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LateData:
    """N pairs in batches, their token states, and for each pair the documents mined for it."""

    documents: TokenStates
    queries: TokenStates
    batches: tuple[tuple[int, ...], ...]
    mined_Nk: Int64[np.ndarray, "N k"]


def draw_batches(pairs: TrainingPairs, config: LateConfig) -> TrainingPairs:
    """Keep the pairs of the batches drawn, batch after batch.

    Every ``batch_queries`` pairs are one. Too few for two batches raise :class:`SourceError`.
    """
    by_source = {
        source: _runs(pairs, source, config.batch_queries) for source in dict.fromkeys(pairs.sources)
    }
    roots = {source: len(runs) ** 0.5 for source, runs in by_source.items()}
    generator = np.random.default_rng(config.seed)
    drawn: list[Sequence[int]] = []
    for source, runs in by_source.items():
        wanted = round(config.max_batches * roots[source] / max(sum(roots.values()), 1.0))
        drawn += [runs[run] for run in generator.permutation(len(runs))[: max(wanted, 1)].tolist()]
    if len(drawn) < MIN_BATCHES:
        raise SourceError(
            f"training needs at least {MIN_BATCHES} batches of {config.batch_queries} pairs of one source "
            f"with different documents, got {len(drawn)}; give more pairs, or lower batch_queries"
        )
    order = generator.permutation(len(drawn)).tolist()
    return pairs.take([pair for place in order for pair in drawn[place]], "pair beyond max_batches")


def embed_pairs(
    pairs: TrainingPairs,
    backbone: Backbone,
    config: LateConfig,
    settings: EncoderConfig,
    *,
    cache: Path | None,
    progress: ProgressListener,
) -> LateData:
    """Return the token states of all pairs behind the settings' prefixes, from the cache where they are kept.

    Documents or queries without a token raise :class:`SourceError`.
    """
    done = 0

    def listen(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress("embed", done, None, "tokens")

    def embed(prefix: Prefix, own: Sequence[str], row_tokens: int, max_tokens: int) -> TokenStates:
        texts = [prefix.continued(text) for text in own]
        key = fingerprint(
            weights=backbone.weights_fingerprint,
            prefix=prefix.ids.tolist(),
            texts=texts,
            row_tokens=row_tokens,
            max_tokens=max_tokens,
        )

        def make() -> Mapping[str, np.ndarray]:
            states = embed_tokens(
                backbone,
                texts,
                batch_tokens=settings.batch_tokens,
                row_tokens=row_tokens,
                max_tokens=max_tokens,
                prefix_ids=prefix.ids,
                on_tokens=listen,
            )
            return {"states": states.states_TV, "ids": states.ids_T, "offsets": states.offsets_N1}

        kept = kept_arrays(None if cache is None else cache / f"{key}.safetensors", key, make)
        return TokenStates(states_TV=kept["states"], ids_T=kept["ids"], offsets_N1=kept["offsets"])

    document_prefix, query_prefix = prefixes_of(settings, backbone)
    documents = embed(document_prefix, pairs.documents, config.row_tokens, config.document_tokens)
    queries = embed(query_prefix, pairs.queries, config.query_tokens, config.query_tokens)
    for what, states in (("documents", documents), ("queries", queries)):
        if not len(states.states_TV):
            raise SourceError(f"{what} of the training pairs must hold tokens, got none; give other pairs")
    numbers = np.arange(len(pairs)).reshape(-1, config.batch_queries)
    return LateData(
        documents=documents,
        queries=queries,
        batches=tuple(map(tuple, numbers.tolist())),
        mined_Nk=mine_hard_negatives(
            means_of(queries),
            means_of(documents),
            pairs.documents,
            pairs.sources,
            num_negatives=config.mined_negatives,
            max_share=MAX_SHARE,
            left_out=numbers[: num_held_out(config, len(numbers))].ravel(),
        ),
    )


def num_held_out(config: LateConfig, num_batches: int) -> int:
    """Return how many batches, the first ones, find the best step."""
    return min(round(config.hold_out * num_batches), num_batches - 1)


def means_of(states: TokenStates) -> Float32[np.ndarray, "N V"]:
    """Return the normalised mean of each text's states; zeros for a text without tokens."""
    means_NV = np.zeros((len(states.offsets_N1) - 1, states.states_TV.shape[1]), np.float32)
    for text in range(len(means_NV)):
        means_NV[text] = states.states_TV[states.of(text)].sum(0, dtype=np.float32)
    norms_N1 = np.linalg.norm(means_NV, axis=1, keepdims=True)
    return means_NV / np.maximum(norms_N1, np.finfo(np.float32).tiny)


def _runs(pairs: TrainingPairs, source: str, size: int) -> list[Sequence[int]]:
    """Cut the pairs of a source, in order, into runs of ``size`` pairs with different documents."""
    runs: list[Sequence[int]] = []
    run: dict[str, int] = {}
    for position, own in enumerate(pairs.sources):
        if own == source:
            run.setdefault(pairs.documents[position], position)
            if len(run) == size:
                runs.append(list(run.values()))
                run = {}
    return runs


STATES_SAMPLE: Final = 100_000
"""Token states that principal directions and root mean squares are taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateReport:
    """What a run did; scores are shares of held-out queries that find their document first.

    ``teacher_score`` is that of whole token states, None where nothing is held out.
    """

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    embed_seconds: float
    train_seconds: float
    first_loss: float
    last_loss: float
    teacher_score: float | None
    best_score: float | None
    best_step: int


def train_late(
    files: Sequence[Path],
    folder: Path,
    config: LateConfig,
    *,
    base: str,
    backend: Backend = "torch",
    precision: Precision = "auto",
    judged: Sequence[Path] = (),
    cache: Path | None = None,
    progress: ProgressListener = silent_progress,
) -> LateReport:
    """Train a token projection for ``base`` on pairs of ``files``; leave it in ``folder``, new or empty.

    Texts of ``judged`` evaluation sets are kept out of the data; token states are kept under ``cache``.
    """
    place = FrozenBaseRun(folder)
    place.require_new()
    settings = encoder_config({"model": base, "backend": backend, "precision": precision})
    backbone = load_backbone(settings)
    if config.dims > backbone.model_dim:
        raise ConfigError(f"dims must be at most the base model's {backbone.model_dim}, got {config.dims}")
    pairs = draw_batches(without_judged(read_pairs(files), judged, progress), config)
    made_of = {"base": backbone.weights_fingerprint, "pairs": pairs_fingerprint(pairs)}
    started = time.monotonic()
    with claimed_folder(place.files, config, made_of, pairs.skipped):
        data = embed_pairs(pairs, backbone, config, settings, cache=cache, progress=progress)
        embedded = time.monotonic()
        objective = ProjectedTokens.of(
            data, text_numbers(pairs.documents), config, backbone.tokenizer.get_vocab_size()
        )
        state = place.train(objective, config, progress)
    sha256 = read_checkpoint(model_folder(base)).weights_sha256
    save_token_projection(folder, objective.projection(sha256))
    if base_of_folder(model_folder(base)) is None:
        # The folder is a model of its own, for `--model`; beside a mixer the file goes into that folder.
        named = Base(model=str(Path(base).absolute()) if is_folder(base) else base, weights_sha256=sha256)
        content = {**settings_of_a_folder(settings), "base": asdict(named)}
        durable.write_json(folder / CAIRN_SETTINGS_NAME, content)
    records = read_log(place.log_path)
    losses = [record["loss"] for record in records if "loss" in record]
    place.finish()
    return LateReport(
        folder=str(folder),
        pairs=len(pairs),
        skipped=pairs.skipped,
        embed_seconds=embedded - started,
        train_seconds=time.monotonic() - embedded,
        first_loss=losses[0],
        last_loss=losses[-1],
        teacher_score=None if state.best_score is None else records[0]["teacher_hit"],
        best_score=state.best_score,
        best_step=state.best_step,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProjectedTokens:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for a token projection.

    Equal documents share a number; the first ``held_out`` batches find the best step.
    """

    model: TokenHead
    data: LateData
    number_N: Int64[np.ndarray, " N"]
    held_out: int
    sample_SD: Float32[np.ndarray, "S D"]
    idf_X: Float32[torch.Tensor, " X"]
    config: LateConfig

    @classmethod
    def of(
        cls, data: LateData, number_N: Int64[np.ndarray, " N"], config: LateConfig, vocabulary_size: int
    ) -> ProjectedTokens:
        """Begin at the principal directions of the documents' states and at the idf of their tokens."""
        documents = data.documents
        every = -(-len(documents.states_TV) // STATES_SAMPLE)
        sample_SD = documents.states_TV[::every].astype(np.float32)
        idf_X = token_idf(documents.ids_T, documents.offsets_N1, vocabulary_size)
        return cls(
            model=TokenHead.of(sample_SD, idf_X, config.dims),
            data=data,
            number_N=number_N,
            held_out=num_held_out(config, len(data.batches)),
            sample_SD=sample_SD,
            idf_X=torch.from_numpy(idf_X),
            config=config,
        )

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        batches = self.data.batches[self.held_out :]
        epoch, place = divmod(step, len(batches))
        order = np.random.default_rng([self.config.seed, epoch]).permutation(len(batches))
        drawn = self._batch(batches[int(order[place])])
        report: dict[str, float] = {}

        def loss() -> torch.Tensor:
            scores = (self._student(drawn), self._teacher(drawn))
            found, terms = late_loss(*scores, drawn.is_left_out_QN, self.config)
            report.update(terms)
            return found

        return Batch(backward=partial(summed_backward, [loss]), report=lambda: report)

    @torch.no_grad()
    def score(self) -> Score | None:
        """See :class:`Objective`: the share of queries that find their document first."""
        hits: list[list[float]] = []
        for pairs in self.data.batches[: self.held_out]:
            batch = self._batch(pairs)
            scores = (self._student(batch), self._teacher(batch))
            hits.append([_hit_rate(score_QN, batch) for score_QN in scores])
        if not hits:
            return None
        own, teacher = np.mean(hits, axis=0).tolist()
        return Score(measures={"heldout_hit": own, "teacher_hit": teacher}, value=own)

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        save_weights(folder, self.model)

    def projection(self, base_sha256: str) -> TokenProjection:
        """Return what was trained, with the root mean squares of pooled vectors."""
        config, sample_SD = self.config, torch.from_numpy(self.sample_SD)
        saved_DV = self.model.matrix.detach().half().float()
        vectors_SV = F.normalize(sample_SD @ saved_DV, dim=1).numpy()
        bounds = np.arange(0, len(vectors_SV) + 1, len(vectors_SV))
        pooled_PV, _ = pool_neighbours(vectors_SV, bounds, config.pool_tokens)
        rms_V = np.sqrt((pooled_PV**2).mean(0))
        return self.model.projection(
            base_sha256, bits=config.bits, pool_tokens=config.pool_tokens, rms_V=rms_V
        )

    def _student(self, batch: LateBatch) -> Float32[torch.Tensor, "Q N"]:
        weight_Qq = self.model.weights_of(batch.query_ids_Qq) * batch.is_query_Qq
        document_NtV = self.model(batch.document_NtD)
        pooled_NpV, is_pooled_Np = pool_padded(document_NtV, batch.is_document_Nt, self.config.pool_tokens)
        return max_sims(self.model(batch.query_QqD), weight_Qq, pooled_NpV, is_pooled_Np)

    @torch.no_grad()
    def _teacher(self, batch: LateBatch) -> Float32[torch.Tensor, "Q N"]:
        weight_Qq = self.idf_X[batch.query_ids_Qq] * batch.is_query_Qq
        return max_sims(batch.query_QqD, weight_Qq, batch.document_NtD, batch.is_document_Nt)

    def _batch(self, pairs: Sequence[int]) -> LateBatch:
        mined = self.data.mined_Nk[list(pairs)].ravel()
        others = sorted(set(mined[mined >= 0].tolist()) - set(pairs))
        asked, candidates = np.array(pairs), np.array([*pairs, *others])
        query_QqD, ids_Qq, is_query_Qq = _padded(self.data.queries, asked)
        document_NtD, _, is_document_Nt = _padded(self.data.documents, candidates)
        is_same_QN = self.number_N[asked][:, None] == self.number_N[candidates][None]
        is_same_QN[np.arange(len(asked)), np.arange(len(asked))] = False
        return LateBatch(
            query_QqD=query_QqD,
            query_ids_Qq=ids_Qq,
            is_query_Qq=is_query_Qq,
            document_NtD=document_NtD,
            is_document_Nt=is_document_Nt,
            is_left_out_QN=torch.from_numpy(is_same_QN),
        )


def _padded(
    states: TokenStates, texts: Int64[np.ndarray, " n"]
) -> tuple[Float32[torch.Tensor, "n t D"], Int64[torch.Tensor, "n t"], Bool[torch.Tensor, "n t"]]:
    """Lay the states of some texts out as a rectangle; return it, the token ids and what is a token."""
    source, is_token = padded_places(states.offsets_N1, texts)
    vectors = torch.from_numpy(states.states_TV[source].astype(np.float32))
    return vectors, torch.from_numpy(states.ids_T[source].astype(np.int64)), torch.from_numpy(is_token)


def _hit_rate(score_QN: Float32[torch.Tensor, "Q N"], batch: LateBatch) -> float:
    best_Q = score_QN.masked_fill(batch.is_left_out_QN, -torch.inf).argmax(1)
    return float((best_Q == torch.arange(len(best_Q))).float().mean())
