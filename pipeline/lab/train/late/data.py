"""Token states of neighbouring pairs, embedded once: what a token projection learns from.

A batch is so many pairs that follow one another in their source, each document once: mostly sections of one
page, which are each other's hard negatives. Sources give batches in proportion to the root of their number.

    FOLDER/<fingerprint>.npz    states float16, ids and offsets of documents and queries
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.encoder_fit import prefixes_of
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.token_states import TokenStates, embed_tokens
from cairn.pipeline.lab.train.late.settings import LateConfig
from cairn.pipeline.lab.train.mining import mine_hard_negatives
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

FORMAT_VERSION = 1
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
        path = None if cache is None else _cache_file(cache, backbone, prefix, texts, row_tokens, max_tokens)
        kept = None if path is None else _read(path)
        if kept is not None:
            return kept
        states = embed_tokens(
            backbone,
            texts,
            batch_tokens=settings.batch_tokens,
            row_tokens=row_tokens,
            max_tokens=max_tokens,
            prefix_ids=prefix.ids,
            on_tokens=listen,
        )
        if path is not None:
            _write(path, states)
        return states

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


def _cache_file(
    cache: Path, backbone: Backbone, prefix: Prefix, texts: Sequence[str], row_tokens: int, max_tokens: int
) -> Path:
    key = fingerprint(
        format=FORMAT_VERSION,
        weights=backbone.weights_fingerprint,
        prefix=prefix.ids.tolist(),
        texts=list(texts),
        row_tokens=row_tokens,
        max_tokens=max_tokens,
    )
    return cache / f"{key}.npz"


def _read(path: Path) -> TokenStates | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return TokenStates(states_TV=arrays["states"], ids_T=arrays["ids"], offsets_N1=arrays["offsets"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(path: Path, states: TokenStates) -> None:
    with durable.storage_errors(f"writing {path.name} to the cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, states=states.states_TV, ids=states.ids_T, offsets=states.offsets_N1)
