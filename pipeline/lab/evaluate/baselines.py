"""The baselines of the table, ranked by pieces of text as RAG pipelines rank them, not by Cairn's search.

    dense           cosine
    bm25            BM25 of whole documents; of pieces where passages are read
    convex          (cosine - mean) / (max - mean) + BM25 / max
    convex+maxsim   convex; its 50 best pieces gain their MaxSim, scaled to 0 … 1 among them

Where nothing else is said a document scores as its best piece. Passages are pieces by their score, without
what a better one holds. Mean and maxima are those of a query over all pieces. BM25 is LanceDB's full-text
index of one column. MaxSim is untrained late interaction: the base model's last-layer token states, a query's
token weighing its idf over the pieces.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import lance
import lancedb
import numpy as np
import pyarrow as pa
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.encoder_fit import prefixes_of
from cairn.pipeline.encode.tokenization import tokenize_after
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.measures import BUDGETS, RUN_DEPTH, Answer, RankedDocuments, Spans, id_ranks
from cairn.pipeline.lab.evaluate.systems import Ranking, Read, System
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.fusion import best_places, normalised_weights
from cairn.pipeline.search.ranking import new_pieces
from cairn.pipeline.search.reader import bounded_words
from cairn.pipeline.token_vectors.codebook import token_idf
from cairn.pipeline.types import ProgressListener
from jaxtyping import Bool, Float, Float32, Float64, Int64
from lance.query import MatchQuery
from lancedb.index import FTS

BLOCK_QUERIES: Final = 32
"""Queries scored at once: 15 MB at 120,000 pieces."""
MAX_SIM_PIECES: Final = 50
"""Best pieces of a query that MaxSim judges."""
BLOCK_PIECES: Final = 2_048
"""Pieces whose token states are held at once: 200 MB at 128 tokens of 384 dimensions."""

MaxSimOf = Callable[[Int64[np.ndarray, "Q K"]], Float32[np.ndarray, "Q K"]]
"""From pieces of every query to their MaxSim."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LexicalHits:
    """BM25's answer to each query, best first, ties by position; bytes of the index on disk."""

    positions: Sequence[Int64[np.ndarray, " _"]]
    scores: Sequence[Float32[np.ndarray, " _"]]
    index_bytes: int


def search_bm25(
    texts: Sequence[str], queries: Sequence[str], limit: int, progress: ProgressListener
) -> LexicalHits:
    """Return LanceDB's best ``limit`` texts of every query, of those that hold a word of it."""
    positions: list[Int64[np.ndarray, " _"]] = []
    scores: list[Float32[np.ndarray, " _"]] = []
    with tempfile.TemporaryDirectory(prefix="cairn-bm25-") as folder, storage_errors("searching with BM25"):
        columns = {"position": pa.array(np.arange(len(texts))), "text": pa.array(texts, pa.large_string())}
        table = lancedb.connect(folder).create_table("texts", pa.table(columns))
        stored = _folder_bytes(Path(folder))
        table.create_index("text", config=FTS(with_position=False))
        dataset = lance.dataset(f"{folder}/texts.lance")
        for number, query in enumerate(queries, start=1):
            # A match query: quotes and operators in a query are words or nothing, never syntax.
            asked = MatchQuery(bounded_words(query), "text")
            found = dataset.scanner(["position", "_score"], full_text_query=asked, limit=limit).to_table()
            place, score = (found.column(name).to_numpy() for name in ("position", "_score"))
            order = np.lexsort((place, -score))
            positions.append(place[order])
            scores.append(score[order])
            progress("bm25", number, len(queries), "queries")
        index_bytes = _folder_bytes(Path(folder)) - stored
    return LexicalHits(positions=positions, scores=scores, index_bytes=index_bytes)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class PieceRanker:
    """Ranks with the pieces of one encoding; BM25 and MaxSim are None where no system needs them."""

    doc_ids: Sequence[str]
    encoded: EncodedSet
    document_bm25: LexicalHits | None = None
    piece_bm25: LexicalHits | None = None
    max_sim_of: MaxSimOf | None = None

    @cached_property
    def _id_rank_N(self) -> Int64[np.ndarray, " N"]:  # noqa: N802 - the shape's suffix
        return id_ranks(self.doc_ids)

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted."""
        scored = self._with_max_sim() if system.reads("token states") else self._scores(system.ranking)
        return [
            Answer(
                documents=RankedDocuments.best(scores_N, self._id_rank_N, depth),
                passages=self._passages(scores_M) if is_wanted else None,
            )
            for (scores_N, scores_M), is_wanted in zip(scored, wants_passages_Q.tolist(), strict=True)
        ]

    def word_bytes(self, system: System) -> int:
        """Return the bytes of the BM25 indexes that a system reads."""
        own: tuple[tuple[Read, Any], ...] = (
            ("document BM25", self.document_bm25),
            ("piece BM25", self.piece_bm25),
        )
        return sum(index.index_bytes for what, index in own if index is not None and system.reads(what))

    def _with_max_sim(self) -> Iterator[_Scores]:
        assert self.max_sim_of is not None, "a system that ranks with MaxSim was given none"
        judged_QK = np.array(
            [best_places(scores_M, MAX_SIM_PIECES) for _, scores_M in self._scores("convex")], np.int64
        )
        max_sim_QK = self.max_sim_of(judged_QK)
        for query, (_, scores_M) in enumerate(self._scores("convex")):
            scores_M[judged_QK[query]] += scaled(max_sim_QK[query])
            yield self._best_of_documents(scores_M), scores_M

    def _scores(self, ranking: Ranking) -> Iterator[_Scores]:
        """Yield the scores of documents and pieces, query by query; minus infinity for no candidate."""
        num_documents, num_pieces = len(self._id_rank_N), len(self.encoded.start_char)
        for query, cosine_M in enumerate(self._cosines()):
            scores_N = None
            match ranking:
                case "bm25":
                    scores_N = _spread(_hits(self.document_bm25, query), num_documents)
                    scores_M = _spread(_hits(self.piece_bm25, query), num_pieces)
                case "convex":
                    scores_M = convex(cosine_M, *_hits(self.piece_bm25, query))
                case _:
                    scores_M = cosine_M.astype(np.float64)
            yield self._best_of_documents(scores_M) if scores_N is None else scores_N, scores_M

    def _cosines(self) -> Iterator[Float32[np.ndarray, " M"]]:
        query_QV = self.encoded.query_vectors_QV
        for start in range(0, len(query_QV), BLOCK_QUERIES):
            yield from query_QV[start : start + BLOCK_QUERIES] @ self.encoded.chunk_vectors_MV.T

    def _best_of_documents(self, scores_M: Float[np.ndarray, " M"]) -> Float[np.ndarray, " N"]:
        return np.maximum.reduceat(scores_M, self.encoded.chunk_offsets[:-1])

    def _passages(self, scores_M: Float[np.ndarray, " M"]) -> Spans:
        """Return what is read of pieces, best first, until the largest budget is spent.

        Of each piece what no better one holds; one with the score minus infinity is never read.
        """
        document_M = self.encoded.chunk_document
        ends, base_N, first_M, stop_M = self._stretches
        rows: list[tuple[int, int, int]] = []
        characters = 0
        for piece, first, stop in new_pieces(scores_M, first_M, stop_M):
            document = int(document_M[piece])
            rows.append((document, *(ends[[first, stop]] - base_N[document]).tolist()))
            characters += rows[-1][2] - rows[-1][1]
            if characters >= max(BUDGETS):
                break
        return Spans.of(rows)

    @cached_property
    def _stretches(self) -> tuple[Int64[np.ndarray, " E"], Int64[np.ndarray, " N"], _Places, _Places]:
        """The ends of all pieces, which may share text, and the places of each piece among them.

        Documents are laid end to end, each from ``base_N`` on, so that one sorted list holds the ends.
        """
        encoded, document_M = self.encoded, self.encoded.chunk_document
        length_N = np.zeros(len(encoded.chunk_offsets) - 1, np.int64)
        np.maximum.at(length_N, document_M, encoded.end_char)
        base_N = np.cumsum(length_N) - length_N
        start_M, end_M = (base_N[document_M] + column for column in (encoded.start_char, encoded.end_char))
        ends = np.unique(np.concatenate([start_M, end_M]))
        return ends, base_N, np.searchsorted(ends, start_M), np.searchsorted(ends, end_M)


_Scores = tuple[Float[np.ndarray, " N"], Float64[np.ndarray, " M"]]
_Places = Int64[np.ndarray, " M"]
_Hits = tuple[Int64[np.ndarray, " A"], Float32[np.ndarray, " A"]]


def _hits(bm25: LexicalHits | None, query: int) -> _Hits:
    """Return what BM25 found; nothing where it was not asked, as of pieces that are not read."""
    if bm25 is None:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    return bm25.positions[query], bm25.scores[query]


def _spread(hits: _Hits, count: int) -> Float64[np.ndarray, " X"]:
    found, scores = hits
    spread_X = np.full(count, -np.inf)
    spread_X[found] = scores
    return spread_X


def convex(
    cosine_M: Float32[np.ndarray, " M"], found: Int64[np.ndarray, " A"], bm25: Float32[np.ndarray, " A"]
) -> Float64[np.ndarray, " M"]:
    """Return cosines above their mean and BM25, each as a share of its maximum, added up."""
    cosine_M = cosine_M.astype(np.float64)
    mean, highest = cosine_M.mean(), cosine_M.max()
    scores_M = (cosine_M - mean) / (highest - mean) if highest > mean else np.zeros_like(cosine_M)
    if len(found):
        scores_M[found] += bm25 / bm25.max()
    return scores_M


def scaled(scores_K: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Lay scores from 0, the lowest, to 1, the highest; all 0 where they are equal."""
    low, high = scores_K.min(), scores_K.max()
    return (scores_K - low) / (high - low) if high > low else np.zeros_like(scores_K)


def score_pieces(
    config: EncoderConfig,
    pieces: Sequence[str],
    queries: Sequence[str],
    asked_QK: Int64[np.ndarray, "Q K"],
    progress: ProgressListener,
) -> Float32[np.ndarray, "Q K"]:
    """Return MaxSim of each query with each of its ``asked`` pieces, whose states are made block by block.

    A token of a query weighs its idf over the pieces, ln(1 + (M - m + ½) / (m + ½)).
    """
    backbone = load_backbone(config)
    tokenizer = backbone.tokenizer
    document, query = prefixes_of(config, backbone)
    # A row holds as much of a text as the model reads.
    room = min(config.window_tokens, backbone.max_positions) - 2 - max(len(document.ids), len(query.ids))
    config = replace(config, pooling="mean", landmark_interval=room)
    encoder = DocumentEncoder(config, None, backbone)
    asking = DocumentEncoder(replace(config, document_prefix=config.query_prefix), None, backbone)
    query_TD = asking.token_states(queries)
    query_tokens = tokenize_after(query, tokenizer, queries)
    tokens = tokenize_after(document, tokenizer, pieces)
    weights_T = token_idf(tokens.ids, tokens.text_offsets, tokenizer.get_vocab_size())[query_tokens.ids]
    lengths_M = np.diff(tokens.text_offsets)
    scores_QK = np.zeros(asked_QK.shape, np.float32)
    wanted = np.unique(asked_QK)
    for start in range(0, len(wanted), BLOCK_PIECES):
        block = wanted[start : start + BLOCK_PIECES]
        states_TD = encoder.token_states([pieces[int(piece)] for piece in block])
        first_B = np.cumsum(lengths_M[block]) - lengths_M[block]
        for number, asked_K in enumerate(asked_QK):
            own = slice(*query_tokens.text_offsets[number : number + 2].tolist())
            places = np.flatnonzero(np.isin(asked_K, block))
            # Only the tokens of the pieces asked for: they are a small part of a block.
            lengths = lengths_M[asked_K[places]]
            judged_TD = states_TD[ranges(first_B[np.searchsorted(block, asked_K[places])], lengths)]
            scores_QK[number, places] = max_sim(query_TD[own], weights_T[own], judged_TD, lengths)
        progress("maxsim", start + len(block), len(wanted), "pieces")
    return scores_QK


def max_sim(
    query_qV: Float[np.ndarray, "q V"],
    weight_q: Float[np.ndarray, " q"],
    token_TV: Float[np.ndarray, "T V"],
    lengths_W: Int64[np.ndarray, " W"],
) -> Float32[np.ndarray, " W"]:
    """Return Σ over query tokens of w · max over a piece's tokens of ⟨q, d⟩, over Σ w, for pieces end to end.

    0 for an empty piece and a query without weight. Source: Khattab & Zaharia 2020 (ColBERT), eq. 3;
    differs: weights.
    """
    best_Wq = np.zeros((len(lengths_W), len(query_qV)), np.float32)
    is_filled_W = lengths_W > 0
    if is_filled_W.any():
        score_Tq = token_TV.astype(np.float32, copy=False) @ query_qV.astype(np.float32, copy=False).T
        first_W = np.cumsum(lengths_W) - lengths_W
        best_Wq[is_filled_W] = np.maximum.reduceat(score_Tq, first_W[is_filled_W], axis=0)
    return best_Wq @ normalised_weights(weight_q)
