"""Cheap vectors of the training pairs: what clusters them, tells false negatives, and mines hard ones.

``static`` is the surrogate that clusters a corpus at ingest, at the cost of tokenising; ``encoder`` is the
base model itself, pooled over the opening of a text, which ranks far better and costs a forward pass over the
data once. Vectors are kept in the run's folder.

    N pairs    V surrogate dim
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import Surrogate
from cairn.pipeline.errors import IntegrityError, ModelError
from cairn.pipeline.lab.train.pairs import Candidates, PairRow, TrainingPairs
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.static_embeddings import StaticEmbedder
from cairn.pipeline.token_vectors.codes import unit
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

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


def kept_vectors(path: Path, key: str, num_pairs: int, embed: Callable[[], PairVectors]) -> PairVectors:
    """Read the vectors that a run has stored under this ``key``, or make and store them."""
    if path.is_file():
        stored = _read(path)
        if stored.fingerprint == key and len(stored.query_NV) == num_pairs:
            return stored
    found = embed()
    stored = PairVectors(document_NV=found.document_NV, query_NV=found.query_NV, fingerprint=key)
    with durable.storage_errors("writing vectors of the pairs"), durable.replacing(path) as temporary:
        save_file(
            {"document": stored.document_NV, "query": stored.query_NV}, temporary, metadata={"key": key}
        )
    return stored


def _read(path: Path) -> PairVectors:
    from safetensors import safe_open

    try:
        with safe_open(path, "numpy") as stored:
            key = (stored.metadata() or {}).get("key", "")
        arrays = load_file(path)
        return PairVectors(document_NV=arrays["document"], query_NV=arrays["query"], fingerprint=key)
    except (SafetensorError, KeyError, OSError) as error:
        raise IntegrityError(
            f"{path.name} of the run must be a whole safetensors file, got a damaged one; delete it and "
            "run again"
        ) from error


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
