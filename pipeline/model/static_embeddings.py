"""Embed text at the cost of tokenising it: the surrogate φ, ψ of asymmetric K-means.

A text is the weighted sum of the base model's *input* token embeddings, a token weighing less the more
documents have it; a linear map, fitted on a sample, drops the direction every text shares. Both are folded
into the table once, so a text costs one gather and one sum.

Source: Arora, Liang & Ma 2017 (SIF): w = a / (a + p), first singular direction removed. Differs: p is a
document frequency, not a token frequency; the directions that stay are cut to 128, as CDE's own clustering
does, and divided by the fourth root of their singular value, which evens out a few loud topics. CDE §4.1
clusters with a transformer (GTR): these vectors group broad topics nearly as well, fine ones less, and rank
clearly worse. Good for clusters, not for search. Needs no torch.

    T token ids (rows of the table)    D model dim    V vector dim    N texts
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from cairn.pipeline.errors import IntegrityError, ModelError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Float32
from tokenizers import Tokenizer

MAX_TOKENS = 256
"""Tokens of a text that are read.

A topic shows in its opening, and the window of the default encoder is no longer.
"""

MAX_CHARACTERS = 8 * MAX_TOKENS
"""Characters that are tokenised.

English has about 4.5 a token, so this keeps a book from being tokenised for its first page.
"""

SMOOTHING = 0.3
"""SIF's a, on document frequencies: a token in 30 % of the documents counts half."""

PROJECTION_DIM = 128
MAX_FIT_TEXTS = 8_192
"""Texts a fit reads; frequencies and directions have settled by then."""

TEXTS_PER_DIRECTION = 4
"""Directions are only as good as their sample: a fit keeps at most one for every four texts."""

MIN_DIRECTIONS = 8
"""Below this many directions nothing is removed or cut: so few texts do not say what they share."""

SCALE_EXPONENT = -0.25
ZERO_NORM = 1e-6
BLOCK_TEXTS = 1_024
BLOCK_TOKENS = 16_384

WEIGHTS = "static.token_weights"
PROJECTION = "static.projection"

Fit = Mapping[str, np.ndarray]
"""What a sample taught, as it is stored: one weight a token, and the map from token space to vectors.

Clusters mean nothing without it.
"""


class StaticEmbedder:
    """A :class:`cairn.pipeline.types.TextEmbedder` without a forward pass.

    A text's vector does not depend on the other texts of a call, bit for bit. The order of its tokens does
    not matter beyond rounding; only the first :data:`MAX_TOKENS` count.
    """

    def __init__(
        self, token_embeddings_TD: Float32[np.ndarray, "T D"], tokenizer: Tokenizer, fit: Fit
    ) -> None:
        """Fold a fit into the table; arrays that are none raise :class:`IntegrityError`."""
        _check_table(token_embeddings_TD, tokenizer)
        if set(fit) != {WEIGHTS, PROJECTION}:
            raise IntegrityError(
                f"a stored static surrogate must hold {PROJECTION}, {WEIGHTS}, got {sorted(fit)}; "
                "cluster again"
            )
        expected = token_embeddings_TD.shape
        if (fit[WEIGHTS].size, fit[PROJECTION].shape[0]) != expected:
            raise ModelError(
                f"the surrogate's fit must be of the model's {expected[0]} tokens x {expected[1]} dims, "
                f"got {fit[WEIGHTS].size} x {fit[PROJECTION].shape[0]}; cluster again with this model"
            )
        self._tokenizer = _bare_tokenizer(tokenizer)
        self._table_TV = _fold(token_embeddings_TD, fit)
        self.vector_dim = self._table_TV.shape[1]  # 128, or less for a small sample or model
        self.fingerprint = fingerprint(
            kind="static",
            table=_sha256(token_embeddings_TD),
            tokenizer=hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest(),
            fit={name: _sha256(array) for name, array in fit.items()},
            max_characters=MAX_CHARACTERS,
        )

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts, L2-normalised; a text without a known token gives a zero row."""
        vectors_NV = np.zeros((len(texts), self.vector_dim), dtype=np.float32)
        for row, ids in enumerate(_token_ids(self._tokenizer, texts)):
            vectors_NV[row] = self._table_TV.take(ids, axis=0).sum(axis=0)
        return _normalised(vectors_NV)


def fit_static(
    token_embeddings_TD: Float32[np.ndarray, "T D"], tokenizer: Tokenizer, texts: Sequence[str]
) -> dict[str, np.ndarray]:
    """Learn token weights and the projection from :data:`MAX_FIT_TEXTS` evenly spaced texts at most.

    Special tokens, the unknown token among them, weigh nothing. A token the sample never had weighs 1.
    """
    _check_table(token_embeddings_TD, tokenizer)
    bare = _bare_tokenizer(tokenizer)
    texts = texts[:: -(-len(texts) // MAX_FIT_TEXTS)] if texts else texts
    document_ids = list(_token_ids(bare, texts))
    counts = np.zeros(len(token_embeddings_TD), dtype=np.int64)
    for ids in document_ids:
        counts[np.unique(ids)] += 1
    weights = SMOOTHING / (SMOOTHING + counts / max(1, len(texts)))
    weights[[token for token, added in bare.get_added_tokens_decoder().items() if added.special]] = 0.0
    token_weights = weights.astype(np.float32)

    directions = min(PROJECTION_DIM, len(texts) // TEXTS_PER_DIRECTION, token_embeddings_TD.shape[1] - 1)
    projection_DV = np.eye(token_embeddings_TD.shape[1], dtype=np.float32)
    if directions >= MIN_DIRECTIONS:
        gram_DD = _gram(token_embeddings_TD, token_weights, document_ids)
        projection_DV = _common_direction_removed(gram_DD, directions)
    return {WEIGHTS: token_weights, PROJECTION: projection_DV}


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _check_table(token_embeddings_TD: np.ndarray, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    table = token_embeddings_TD
    if table.ndim != 2 or table.dtype != np.float32 or len(table) < size:
        raise ModelError(
            f"the token embedding table must be float32 with at least {size} rows, one a token, "
            f"got {table.dtype} {table.shape}; table and tokenizer are of different models"
        )
    if not np.isfinite(token_embeddings_TD).all():
        raise ModelError(
            "the token embedding table must be finite, got NaN or infinity; the weights are damaged"
        )


def _bare_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer with our own limit and without padding, which would count as tokens."""
    bare: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    bare.no_padding()
    bare.enable_truncation(MAX_TOKENS)
    return bare


def _token_ids(bare: Tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the first tokens of each text, tokenised a block at a time so that memory stays bounded."""
    for start in range(0, len(texts), BLOCK_TEXTS):
        heads = [text.lstrip()[:MAX_CHARACTERS] for text in texts[start : start + BLOCK_TEXTS]]
        for encoding in bare.encode_batch_fast(heads, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int32)


def _fold(token_embeddings_TD: np.ndarray, fit: Fit) -> Float32[np.ndarray, "T V"]:
    """Apply weights and projection to the table itself; both are linear, so they may go before the sum."""
    folded_TV = np.empty((len(token_embeddings_TD), fit[PROJECTION].shape[1]), dtype=np.float32)
    for start in range(0, len(folded_TV), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        folded_TV[rows] = (token_embeddings_TD[rows] * fit[WEIGHTS][rows, None]) @ fit[PROJECTION]
    return folded_TV


def _gram(
    token_embeddings_TD: np.ndarray, token_weights: np.ndarray, document_ids: Sequence[np.ndarray]
) -> np.ndarray:
    """Return XᵀX in float64, X the documents' L2-normalised weighted sums, without holding X."""
    gram_DD = np.zeros((token_embeddings_TD.shape[1],) * 2, dtype=np.float64)
    for start in range(0, len(document_ids), BLOCK_TEXTS):
        sums = [
            token_weights[ids] @ token_embeddings_TD[ids] for ids in document_ids[start : start + BLOCK_TEXTS]
        ]
        block_ND = _normalised(np.stack(sums)).astype(np.float64)
        gram_DD += block_ND.T @ block_ND
    return gram_DD


def _common_direction_removed(gram_DD: np.ndarray, directions: int) -> Float32[np.ndarray, "D V"]:
    """Return singular directions 2 … directions + 1 as scaled columns, the largest entry of each positive."""
    eigenvalues, vectors_DD = np.linalg.eigh(gram_DD)
    kept = np.arange(len(eigenvalues) - 2, len(eigenvalues) - 2 - directions, -1)
    kept_DV = vectors_DD[:, kept]
    kept_DV = kept_DV * np.sign(kept_DV[np.abs(kept_DV).argmax(axis=0), np.arange(directions)])
    floor = eigenvalues[-1] * np.finfo(np.float32).eps
    singular = (
        np.sqrt(np.maximum(eigenvalues[kept], floor) / eigenvalues[-1])
        if eigenvalues[-1] > 0
        else np.ones(directions)
    )
    return (kept_DV * singular**SCALE_EXPONENT).astype(np.float32)


def _normalised(vectors_NV: Float32[np.ndarray, "N V"]) -> Float32[np.ndarray, "N V"]:
    """Divide rows by their length in place; a row of rounding noise becomes zero."""
    norms_N1 = np.linalg.norm(vectors_NV, axis=1, keepdims=True)
    vectors_NV *= np.where(norms_N1 > ZERO_NORM, 1.0, 0.0) / np.maximum(norms_N1, ZERO_NORM)
    return vectors_NV
