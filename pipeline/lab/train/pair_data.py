"""The data of a run on pairs, made once: vectors and hard negatives.

Vectors stay in the run's folder, so a run that goes on embeds nothing again. They cluster the pairs, tell
false negatives, and mine hard ones. The surrogate that makes them is the base model itself, pooled over the
opening of a text.

Positive-aware hard negatives are what it ranks highest among what scores below 95 % of the positive
(TopK-PercPos). What scores nearly as high as the positive is likely to answer the query too. Candidates are
the documents of the query's own source: those of another are seldom hard, and searching them all costs the
square of the data. Source: NV-Embed §4.1.1, after Moreira et al. 2024 (NV-Retriever). Differs: the surrogate
is the base model, not a 7B teacher.

    N pairs    k own negatives of a query    V surrogate dim
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError, SourceError
from cairn.pipeline.lab.kept_arrays import kept_arrays
from cairn.pipeline.lab.train.pairs import NONE_FOUND, Candidates, TrainingPairs, text_numbers
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.token_vectors.projection import unit
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

BLOCK_QUERIES: Final = 256


def mine_hard_negatives(
    query_NV: Float32[np.ndarray, "N V"],
    document_NV: Float32[np.ndarray, "N V"],
    documents: Sequence[str],
    sources: Sequence[str],
    *,
    num_negatives: int,
    max_share: float,
    left_out: Int64[np.ndarray, " n"],
) -> Int64[np.ndarray, "N k"]:
    """Return for each pair the pairs with the hardest negative documents, hardest first.

    They score below ``max_share`` of the positive's score. :data:`NONE_FOUND` fills up where there are no
    more. Pairs ``left_out`` are negatives of no pair. A text is taken once, and never the positive's own.
    """
    mined_Nk = np.full((len(query_NV), num_negatives), NONE_FOUND, np.int64)
    numbers_N = text_numbers(documents)
    names = np.array(sources)
    for name in np.unique(names).tolist():
        positions = np.flatnonzero(names == name)
        allowed = np.setdiff1d(positions, left_out)
        _, first = np.unique(numbers_N[allowed], return_index=True)
        candidates = allowed[np.sort(first)]
        if not len(candidates):
            continue
        for start in range(0, len(positions), BLOCK_QUERIES):
            block = positions[start : start + BLOCK_QUERIES]
            scores_qc = query_NV[block] @ document_NV[candidates].T
            positive_q = np.einsum("qv,qv->q", query_NV[block], document_NV[block])
            # A negative score has its 95 % below it, too.
            limit_q = positive_q - (1.0 - max_share) * np.abs(positive_q)
            is_refused = (scores_qc >= limit_q[:, None]) | (
                numbers_N[candidates][None] == numbers_N[block][:, None]
            )
            scores_qc[is_refused] = -np.inf
            num_kept = min(num_negatives, len(candidates))
            best = np.argpartition(-scores_qc, num_kept - 1, axis=1)[:, :num_kept]
            best = np.take_along_axis(
                best, np.lexsort((best, -np.take_along_axis(scores_qc, best, axis=1)), axis=1), axis=1
            )
            is_found = np.isfinite(np.take_along_axis(scores_qc, best, axis=1))
            mined_Nk[block, :num_kept] = np.where(is_found, candidates[best], NONE_FOUND)
    return mined_Nk


MAX_TOKENS: Final = 256
BLOCK_TEXTS: Final = 2_048


class PairVectors(NamedTuple):
    """L2-normalised vectors of N queries (ψ), and of their documents (φ) and the M that are negatives alone.

    Documents stand in the order of :class:`cairn.pipeline.lab.train.pairs.Candidates`.
    """

    document_NV: Float32[np.ndarray, "NM V"]
    query_NV: Float32[np.ndarray, "N V"]


def embed_pairs(pairs: TrainingPairs, backbone: Backbone, progress: ProgressListener) -> PairVectors:
    """Embed both sides of every pair; equal documents are embedded once."""
    embedder = ContextEncoder(backbone, min(MAX_TOKENS, backbone.max_positions))
    documents = Candidates.of(pairs).texts
    vectors = embed_texts(
        embedder.embed, [*documents, *(row.query for row in pairs.rows)], "surrogate", progress
    )
    document_NV, query_NV = np.split(vectors, [len(documents)])
    return PairVectors(document_NV, query_NV)


def embed_texts(
    embed: Callable[[Sequence[str]], Float32[np.ndarray, "t V"]],
    texts: Sequence[str],
    stage: str,
    progress: ProgressListener,
) -> Float32[np.ndarray, "T V"]:
    """Embed distinct texts at unit length; NaN raises :class:`ModelError` that names the ``stage``."""
    distinct = list(dict.fromkeys(texts))
    blocks: list[np.ndarray] = []
    for start in range(0, len(distinct), BLOCK_TEXTS):
        blocks.append(unit(embed(distinct[start : start + BLOCK_TEXTS])))
        if not np.isfinite(blocks[-1]).all():
            raise ModelError(
                f"vectors of the {stage} must be finite, got NaN or infinity; fetch the model again"
            )
        progress(stage, min(start + BLOCK_TEXTS, len(distinct)), len(distinct), "texts")
    number = {text: place for place, text in enumerate(distinct)}
    return np.concatenate(blocks)[[number[text] for text in texts]]


def pairs_fingerprint(pairs: TrainingPairs) -> str:
    """Identify the pairs and their order, without a copy of their text."""
    digest = hashlib.sha256()
    for row in pairs.rows:
        digest.update(repr(tuple(row)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What steps draw on: texts by position of their pair, surrogate vectors, mined negatives.

    Equal documents share a number. ``pool_of_pair`` are the documents of each pair's source, where contexts
    are drawn from sources.
    """

    maker: SequenceMaker
    vectors: PairVectors
    document_number_N: Int64[np.ndarray, " NM"]
    hard_negatives_Nk: Int64[np.ndarray, "N k"]
    pool_of_pair: Sequence[Int64[np.ndarray, " _"]] | None = None


def require_negatives(pairs: TrainingPairs, config: TrainConfig) -> None:
    """Raise :class:`SourceError` where queries need negatives of their own, and none has any."""
    if config.negatives == "own" and not (config.hard_negatives or any(row.negatives for row in pairs.rows)):
        raise _no_negatives()


def prepared(
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    checkpoint: Checkpoint,
    served: EncoderConfig,
    config: TrainConfig,
    folder: Path,
    progress: ProgressListener,
) -> TrainingData:
    """Embed the pairs and find hard negatives; vectors stay in ``folder``."""
    backbone = load_backbone(EncoderConfig(model=served.model))
    maker = SequenceMaker(
        checkpoint,
        pairs,
        served,
        max_query_tokens=config.max_query_tokens,
        max_document_tokens=config.max_document_tokens,
    )
    maker.require_room(backbone.max_positions)
    kept = kept_arrays(
        folder / "surrogate.safetensors",
        fingerprint(surrogate=checkpoint.fingerprint, pairs=pairs_fingerprint(pairs)),
        lambda: embed_pairs(pairs, backbone, progress)._asdict(),
    )
    vectors, candidates = PairVectors(**kept), Candidates.of(pairs)
    document_number_N = text_numbers(candidates.texts)
    given_Nk = candidates.given_Nk.copy()
    is_held_out = np.isin(document_number_N, document_number_N[heldout])
    given_Nk[is_held_out[given_Nk] & (given_Nk != NONE_FOUND)] = NONE_FOUND
    return TrainingData(
        maker=maker,
        vectors=vectors,
        document_number_N=document_number_N,
        hard_negatives_Nk=_negatives(pairs, heldout, vectors, given_Nk, config, progress),
        pool_of_pair=pools_of_sources(pairs, heldout) if config.context_from == "source" else None,
    )


def _negatives(
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    vectors: PairVectors,
    given_Nk: Int64[np.ndarray, "N given"],
    config: TrainConfig,
    progress: ProgressListener,
) -> Int64[np.ndarray, "N k"]:
    """Return the places of each pair's own negatives: those it brings, else mined ones."""
    mined_Nk = np.zeros((len(pairs), 0), np.int64)
    if config.hard_negatives:
        progress("mining", 0, len(pairs), "pairs")
        mined_Nk = mine_hard_negatives(
            vectors.query_NV,
            vectors.document_NV[: len(pairs)],
            pairs.documents,
            [row.source for row in pairs.rows],
            num_negatives=config.hard_negatives,
            max_share=config.hard_negative_share,
            left_out=heldout,
        )
        mined_Nk[(given_Nk != NONE_FOUND).any(1)] = NONE_FOUND
    own_Nk = np.concatenate([mined_Nk, given_Nk], axis=1)
    num_without = int((own_Nk == NONE_FOUND).all(1).sum())
    if config.negatives == "own" and num_without:
        if num_without == len(pairs):
            raise _no_negatives()
        logger.warning("%d of %d pairs have no negatives and teach nothing", num_without, len(pairs))
    return own_Nk


def _no_negatives() -> SourceError:
    return SourceError(
        "pairs must have negatives where a query is ranked against its own alone, got none; give a column "
        "negatives or hard_negatives, or leave negatives at batch"
    )


def pools_of_sources(pairs: TrainingPairs, heldout: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " _"]]:
    """Return for each pair the pairs of its source with different documents, held-out ones left out."""
    left_out = set(heldout.tolist())
    first: dict[str, dict[str, int]] = {row.source: {} for row in pairs.rows}
    for position, row in enumerate(pairs.rows):
        if position not in left_out:
            first[row.source].setdefault(row.document, position)
    pools = {source: np.array(list(own.values()), np.int64) for source, own in first.items()}
    return [pools[row.source] for row in pairs.rows]
