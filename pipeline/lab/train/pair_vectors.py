"""What is computed once of training pairs: vectors, hard negatives, what teachers say; kept with the run.

Vectors cluster the pairs, tell false negatives, and mine hard ones. Surrogate ``static`` is the one that
clusters a corpus at ingest, at the cost of tokenising; ``encoder`` is the base model itself, pooled over the
opening of a text, which ranks far better and costs a forward pass over the data once.

Positive-aware hard negatives are what it ranks highest below a threshold under the positive's score:

    by percentage   score < share x positive           TopK-PercPos, 95 % by default
    by margin       score < positive - margin          TopK-MarginPos, none by default

What scores nearly as high as the positive is likely to answer the query too; with both thresholds the lower
one holds. Candidates are the documents of the query's own source: those of another are seldom hard, and
searching them all costs the square of the data. Source: NV-Embed §4.1.1 (percentage), after Moreira et al.
2024 (NV-Retriever), which compares both. Differs: the surrogate is the base model, not a 7B teacher.

A teacher of any family and width is laid into the base model's space:

    teacher's vectors ─▶ as many principal axes as the base has dimensions ─▶ the nearest rotation

A rotation changes no score between the teacher's vectors. It is found in closed form, so nothing is trained
beside the model, and a run repeats bit for bit. Source: vectors of texts as the only target, as in LEAF; the
rotation is the orthogonal Procrustes solution (Schönemann 1966). Differs from LEAF: there a linear map behind
the student is trained and kept.

    N pairs    T texts    V surrogate dim    D width of the base    E width of the teacher    K candidates
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import Surrogate
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.pairs import Candidates, PairRow, TrainingPairs, text_numbers
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.static_embeddings import StaticEmbedder
from cairn.pipeline.token_vectors.codes import unit
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)

NONE_FOUND: Final = -1
BLOCK_QUERIES: Final = 256


def score_limit(positive_q: Float32[np.ndarray, " q"], max_share: float, margin: float) -> np.ndarray:
    """Return the score below which a text is a negative, for each query by its positive's score."""
    # A negative score has its 95 % below it, too.
    return positive_q - np.maximum((1.0 - max_share) * np.abs(positive_q), margin)


def mine_hard_negatives(
    query_NV: Float32[np.ndarray, "N V"],
    document_NV: Float32[np.ndarray, "N V"],
    documents: Sequence[str],
    sources: Sequence[str],
    *,
    num_negatives: int,
    max_share: float,
    left_out: Int64[np.ndarray, " n"],
    margin: float = 0.0,
) -> Int64[np.ndarray, "N k"]:
    """Return for each pair the pairs with the hardest negative documents, hardest first.

    They score below ``max_share`` of the positive's score and by more than ``margin`` below it.
    :data:`NONE_FOUND` fills up where there are no more. Pairs ``left_out`` are negatives of no pair. A text
    is taken once, and never the positive's own.
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
            limit_q = score_limit(positive_q, max_share, margin)
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
FIT_TEXTS: Final = 8_192
BLOCK_TEXTS: Final = 2_048


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairVectors:
    """L2-normalised vectors of N queries (ψ), and of their documents (φ) and the M that are negatives alone.

    Documents stand in the order of :class:`cairn.pipeline.lab.train.pairs.Candidates`.
    """

    document_NV: Float32[np.ndarray, "NM V"]
    query_NV: Float32[np.ndarray, "N V"]
    fingerprint: str


def embed_pairs(
    pairs: TrainingPairs, backbone: Backbone, surrogate: Surrogate, progress: ProgressListener
) -> PairVectors:
    """Embed both sides of every pair; equal documents are embedded once."""
    if surrogate == "static":
        order = hash_order(
            [f"{query}\n{document}" for query, document in zip(pairs.queries, pairs.documents, strict=True)],
            0,
        )
        sample = [pairs.documents[position] for position in order[:FIT_TEXTS].tolist()]
        embedder, _ = StaticEmbedder.fitted_to(backbone.token_embeddings, backbone.tokenizer, sample)
    else:
        embedder = ContextEncoder(backbone, min(MAX_TOKENS, backbone.max_positions))
    documents = Candidates.of(pairs).texts
    vectors = embed_texts(embedder.embed, [*documents, *pairs.queries], "surrogate", progress)
    document_NV, query_NV = np.split(vectors, [len(documents)])
    return PairVectors(document_NV=document_NV, query_NV=query_NV, fingerprint=embedder.fingerprint)


def embed_texts(
    embed: Callable[[Sequence[str]], Float32[np.ndarray, "t V"]],
    texts: Sequence[str],
    stage: str,
    progress: ProgressListener,
) -> Float32[np.ndarray, "T V"]:
    """Embed texts at unit length, block by block; equal texts are embedded once.

    NaN raises :class:`ModelError`; ``stage`` is what embeds, such as "teacher".
    """
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


def kept_arrays(
    path: Path | None, key: str, make: Callable[[], Mapping[str, np.ndarray]]
) -> Mapping[str, np.ndarray]:
    """Read the arrays that are stored at ``path`` under this ``key``, or make and store them.

    A damaged file is made again. Without a path nothing is stored.
    """
    if path is not None and path.is_file():
        try:
            with safe_open(path, "numpy") as stored:
                if (stored.metadata() or {}).get("key") == key:
                    return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            logger.warning("%s is damaged, and made again", path.name)
    arrays = make()
    if path is not None:
        with durable.storage_errors(f"writing {path.name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path) as temporary:
                save_file(dict(arrays), temporary, metadata={"key": key})
    return arrays


def kept_vectors(path: Path, key: str, embed: Callable[[], PairVectors]) -> PairVectors:
    """Do the same with vectors of pairs."""

    def make() -> Mapping[str, np.ndarray]:
        found = embed()
        return {"document": found.document_NV, "query": found.query_NV}

    arrays = kept_arrays(path, key, make)
    return PairVectors(document_NV=arrays["document"], query_NV=arrays["query"], fingerprint=key)


def vectors_key(surrogate: Surrogate, model_fingerprint: str, pairs: TrainingPairs) -> str:
    """Identify what the vectors were made of."""
    return fingerprint(surrogate=surrogate, model=model_fingerprint, pairs=pairs_fingerprint(pairs))


def pairs_fingerprint(pairs: TrainingPairs) -> str:
    """Identify the pairs and their order, without a copy of their text."""
    digest = hashlib.sha256()
    for row in pairs.rows():
        # What came as a pair is what it was before pairs could come of documents or have negatives.
        texts = row[:6] if row.page else row[:4]
        if row != PairRow(*row[:6]):
            texts = (*texts, row.instruction, row.task, *row.negatives)
        for text in texts:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


FITTED_PAIRS = 8_192
"""Pairs that axes and rotation are found from, at most."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """An encoder of whole texts; a document is read up to 256 tokens at a time."""

    encoder: DocumentEncoder

    @classmethod
    def named(cls, name: str) -> Teacher:
        """Load a model by name or folder, with the settings its folder brings but without a context.

        Raises :class:`ConfigError` where there is none.
        """
        try:
            config = encoder_config({"model": name, "use_context": False})
            backbone = load_backbone(config)
        except ConfigError as error:
            raise ConfigError(f"the teacher cannot be loaded: {error}") from error
        if config.attention == "chunk":
            prefix = backbone.tokenizer.encode(config.document_prefix, add_special_tokens=False).ids
            longest = min(MAX_TOKENS, backbone.max_positions - 2 - len(prefix))
            config = replace(config, landmark_interval=longest, whole_text_tokens=0)
        return cls(DocumentEncoder(config, backbone=backbone))

    def embed(self, pairs: TrainingPairs, progress: ProgressListener) -> PairVectors:
        """Embed both sides of every pair; equal texts are embedded once."""

        def documents(texts: Sequence[str]) -> Float32[np.ndarray, "t E"]:
            return self.encoder.encode(texts).document_vectors_NV

        return PairVectors(
            document_NV=embed_texts(documents, Candidates.of(pairs).texts, "teacher", progress),
            query_NV=embed_texts(self.encoder.encode_queries, pairs.queries, "teacher", progress),
            fingerprint=self.encoder.fingerprint,
        )


def fitted_positions(num_pairs: int) -> Int64[np.ndarray, " n"]:
    """Return the pairs, evenly spread, that axes and rotation are found from."""
    return np.arange(0, num_pairs, max(1, -(-num_pairs // FITTED_PAIRS)))


def laid_onto(taught: PairVectors, base: PairVectors) -> PairVectors:
    """Return the teacher's vectors in the width and the orientation of the base's, at unit length.

    ``base`` has the vectors of :func:`fitted_positions` first, and no more queries. A wider teacher keeps its
    first principal axes (not centred: scores are inner products).
    """
    fitted = fitted_positions(len(taught.query_NV))
    teacher_TE = np.concatenate([taught.document_NV[fitted], taught.query_NV[fitted]]).astype(np.float64)
    base_TD = np.concatenate([base.document_NV[: len(fitted)], base.query_NV]).astype(np.float64)
    _, _, axes_EE = np.linalg.svd(teacher_TE.T @ teacher_TE)
    axes_AE = axes_EE[: base_TD.shape[1]]
    # Procrustes: the orthonormal rows that bring the teacher's coordinates nearest to the base's.
    left_AA, _, right_AD = np.linalg.svd((teacher_TE @ axes_AE.T).T @ base_TD, full_matrices=False)
    map_ED = (axes_AE.T @ (left_AA @ right_AD)).astype(np.float32)
    return PairVectors(
        document_NV=unit(taught.document_NV @ map_ED),
        query_NV=unit(taught.query_NV @ map_ED),
        fingerprint=taught.fingerprint,
    )


def candidate_scores(
    path: Path,
    teacher: CrossEncoderReranker,
    queries: Sequence[str],
    texts: Sequence[str],
    own_Nk: Int64[np.ndarray, "N k"],
    left_out: Int64[np.ndarray, " n"],
    progress: ProgressListener,
) -> Float32[np.ndarray, "N K"]:
    """Return the logits of each query with ``texts`` of its own place and of ``own_Nk``; K is k + 1.

    NaN where there is no candidate, and for pairs ``left_out``; they are kept at ``path``. Source: LMK §5 and
    appendix, training with hard negatives and distillation scores of a reranker. The paper takes published
    scores; here a local cross-encoder makes them once, before the first step.
    """
    places_NK = np.concatenate([np.arange(len(queries))[:, None], own_Nk], axis=1)
    places_NK[left_out] = NONE_FOUND

    def score() -> Mapping[str, np.ndarray]:
        scores_NK = np.full(places_NK.shape, np.nan, np.float32)
        for number, query in enumerate(queries):
            is_there = places_NK[number] != NONE_FOUND
            if is_there.any():
                own: list[str] = [texts[int(place)] for place in places_NK[number, is_there]]
                scores_NK[number, is_there] = teacher.logits(query, own)
            progress("teacher", number + 1, len(queries), "queries")
        return {"logits": scores_NK}

    key = fingerprint(
        teacher=teacher.fingerprint, places=places_NK.tolist(), queries=list(queries), texts=list(texts)
    )
    return kept_arrays(path, key, score)["logits"]
