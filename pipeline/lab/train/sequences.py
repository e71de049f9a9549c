"""From pairs to the rows of a batch: sequences of neighbouring documents, each cut by an interval.

    unit       neighbouring pairs of one source: documents d1 d2 d3 …, each once, and the queries they answer
    window     ([CLS] title [LMK] ·) [CLS] d1 z1 [LMK] · [CLS] d1 z2 [LMK] · [CLS] d2 z1 [LMK] · …
               chunks see one another's landmarks
    query      [CLS] q [LMK]      a window of its own, pooled alike
    prefix     [CLS] prefix z [LMK]   of queries and of documents, in every row; read, and not pooled
    full       [CLS] d1 z1 [LMK] d1 z2 [LMK] …   with full attention: a document a row, without its neighbours

Every document of a batch is a candidate for every query, so the other documents of its own sequence, which
its chunks can see, are among a query's negatives: a landmark has to say what stands in its chunk, and not
what stands around it.

Source: LMK pooling §4, variable chunking, an interval drawn for each sequence. Differs: documents are
neighbours of one file, not drawn at random, and the loss is CDE's. Instructions stand before queries and are
masked from pooling as in NV-Embed, §4, eq. 2; texts of classes and scored ones make no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.encode.prefixes import Prefix, instruction_prefix
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import Candidates, TrainingPairs
from cairn.pipeline.lab.train.settings import TrainedAttention, TrainedPooling
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.landmarks import Chunks, Rows, lay_out, split_into_chunks
from cairn.pipeline.ragged import ranges
from jaxtyping import Int32, Int64
from tokenizers import Tokenizer

NO_TEXT = -1
"""Number of a chunk that belongs to no text of the loss: a title."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceBatch:
    """Rows of a batch and what they are for.

    Texts are numbered queries first, then documents; ``text_B`` is each chunk's. ``positive_Q`` counts
    documents only, ``pair_Q`` and ``pair_D`` are positions of training pairs: those of the queries, and for
    each document one whose document it is.
    """

    rows: PackedRows
    text_B: Int64[np.ndarray, " M"]
    pair_Q: Int64[np.ndarray, " Q"]
    pair_D: Int64[np.ndarray, " documents"]
    positive_Q: Int64[np.ndarray, " Q"]


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    number: int
    window: int
    interval: int
    max_tokens: int
    prefix: str = ""


def make_units(
    pairs: TrainingPairs, positions: Sequence[int], sequence_documents: int
) -> tuple[tuple[int, ...], ...]:
    """Cut pairs into runs of one source and page, and these into units of ``sequence_documents``.

    Runs keep the order of the pairs. Pairs that follow one another with the same document stay together:
    their queries share a segment. Texts that are no documents of a page are units of their own.
    """
    units: list[list[int]] = []
    seen: set[str] = set()
    origin: tuple[str, str] | None = None
    for position in positions:
        document, own = pairs.documents[position], (pairs.sources[position], pairs.pages[position])
        is_alone = pairs.tasks[position] != "retrieval"
        if own != origin or is_alone or (document not in seen and len(seen) == sequence_documents):
            origin, seen = own, set()
            units.append([])
        if is_alone:
            origin = None
        seen.add(document)
        units[-1].append(position)
    return tuple(map(tuple, units))


def units_of_a_batch(units: Sequence[Sequence[int]], batch_pairs: int) -> int:
    """Return how many units make a batch of about so many pairs."""
    return max(1, round(batch_pairs * len(units) / sum(map(len, units))))


class SequenceMaker:
    """Lays batches out for one model; reads texts, draws nothing."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pairs: TrainingPairs,
        *,
        pooling: TrainedPooling,
        max_query_tokens: int,
        max_document_tokens: int,
        attention: TrainedAttention = "landmark",
        window_tokens: int = 512,
        query_prefix: str = "",
        document_prefix: str = "",
        pool_prefix: bool = False,
    ) -> None:
        self._tokenizer: Tokenizer = checkpoint.tokenizer
        self._cls_id, self._landmark_id = checkpoint.cls_id, checkpoint.landmark_id
        self._pairs = pairs
        self._pooling: TrainedPooling = pooling
        self._attention: TrainedAttention = attention
        self._window_tokens = window_tokens
        self._max_query_tokens, self._max_document_tokens = max_query_tokens, max_document_tokens
        self._candidates = Candidates.of(pairs)
        self._query_prefix, self._document_prefix = query_prefix, document_prefix
        self._pool_prefix = pool_prefix
        instructions = {instruction_prefix(text) for text in pairs.instructions if text}
        used = {query_prefix, document_prefix, "", *instructions}
        self._prefixes = {text: Prefix.of(text, self._tokenizer) for text in sorted(used)}

    @property
    def prefix_tokens(self) -> int:
        """Return the tokens of the longest prefix, which every row must have room for."""
        return max(len(prefix.ids) for prefix in self._prefixes.values())

    def require_room(self, max_positions: int) -> None:
        """Raise :class:`ConfigError` where a prefix leaves no room for a text."""
        if self.prefix_tokens + 2 >= max_positions:
            raise ConfigError(
                f"prefixes and instructions must be shorter than the model's {max_positions} positions less "
                f"two, got one of {self.prefix_tokens} tokens; shorten it"
            )

    def _query(self, position: int, number: int, window: int, interval: int) -> _Text:
        instruction = self._pairs.instructions[position]
        prefix = instruction_prefix(instruction) if instruction else self._query_prefix
        return _Text(self._pairs.queries[position], number, window, interval, self._max_query_tokens, prefix)

    def _document(self, place: int, number: int, window: int, interval: int) -> _Text:
        prefix = self._candidates.prefixes[place] or self._document_prefix
        text = self._candidates.texts[place]
        return _Text(text, number, window, interval, self._max_document_tokens, prefix)

    def make(
        self,
        units: Sequence[Sequence[int]],
        intervals_U: Int64[np.ndarray, " U"],
        has_title_U: np.ndarray,
        negatives: Sequence[int] = (),
        negative_interval: int = 64,
    ) -> SequenceBatch:
        """Lay out the units' queries and documents, and behind them ``negatives``.

        Places of :class:`cairn.pipeline.lab.train.pairs.Candidates`, of which the document alone is taken.
        """
        pair_Q = np.array([position for unit in units for position in unit], np.int64)
        unit_Q = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        num_queries = len(pair_Q)
        texts = [
            self._query(position, query, query, int(intervals_U[unit]))
            for query, (position, unit) in enumerate(zip(pair_Q.tolist(), unit_Q.tolist(), strict=True))
        ]
        pair_D: list[int] = []
        positive_Q: list[int] = []
        for unit, positions in enumerate(units):
            window, interval = num_queries + unit, int(intervals_U[unit])
            titles = {self._pairs.titles[position] for position in positions}
            is_titled = has_title_U[unit] and len(titles) == 1 and self._attention != "full"
            if is_titled and (title := titles.pop()).strip():
                texts.append(
                    _Text(title, NO_TEXT, window, interval, self._max_query_tokens, self._document_prefix)
                )
            numbers: dict[str, int] = {}
            for position in positions:
                document = self._pairs.documents[position]
                if document not in numbers:
                    numbers[document] = len(pair_D)
                    texts.append(self._document(position, num_queries + len(pair_D), window, interval))
                    pair_D.append(position)
                positive_Q.append(numbers[document])
        for window, position in enumerate(negatives, start=num_queries + len(units)):
            texts.append(self._document(position, num_queries + len(pair_D), window, negative_interval))
            pair_D.append(position)
        rows, text_of_chunk = self._rows(texts)
        return SequenceBatch(
            rows=rows,
            text_B=np.array([text.number for text in texts], np.int64)[text_of_chunk],
            pair_Q=pair_Q,
            pair_D=np.array(pair_D, np.int64),
            positive_Q=np.array(positive_Q, np.int64),
        )

    def context(self, positions: Sequence[int], max_tokens: int) -> PackedRows:
        """Lay out the documents of these pairs as the first stage reads them: a row each, its opening.

        Without a prefix, as an ingest has it.
        """
        own_tokens = max_tokens - (1 if self._cls_id is None else 2)
        texts = [
            _Text(self._candidates.texts[position], number, number, max_tokens, own_tokens)
            for number, position in enumerate(positions)
        ]
        return self._rows(texts)[0]

    def queries(self, positions: Sequence[int], interval: int) -> tuple[PackedRows, Int64[np.ndarray, " M"]]:
        """Lay out these pairs' queries, and the query each chunk is of."""
        texts = [self._query(position, number, number, interval) for number, position in enumerate(positions)]
        return self._rows(texts)

    def documents(
        self, positions: Sequence[int], interval: int
    ) -> tuple[PackedRows, Int64[np.ndarray, " M"]]:
        """Lay out these pairs' documents, each a window of its own, and the document each chunk is of."""
        texts = [
            self._document(position, number, number, interval) for number, position in enumerate(positions)
        ]
        return self._rows(texts)

    def _rows(self, texts: Sequence[_Text]) -> tuple[PackedRows, Int64[np.ndarray, " M"]]:
        """Return the rows of texts, each cut after its limit, and for each chunk the place of its text."""
        prefixes = [self._prefixes[text.prefix] for text in texts]
        tokens = tokenize(
            self._tokenizer,
            [prefix.continued(text.text) for text, prefix in zip(texts, prefixes, strict=True)],
        )
        lengths = np.minimum(
            np.diff(tokens.text_offsets), np.array([text.max_tokens for text in texts], np.int64)
        )
        kept = ranges(tokens.text_offsets[:-1], lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        chunks = split_into_chunks(
            tokens.breaks[kept], offsets, np.array([text.interval for text in texts], np.int64)
        )
        rows = self._laid_out(tokens.ids[kept], chunks)
        text_of_chunk = np.repeat(np.arange(len(texts)), np.diff(chunks.chunk_offsets))
        first_of_row = np.searchsorted(rows.pooled_row, np.arange(len(rows.row_offsets) - 1))
        text_of_row = text_of_chunk[first_of_row]
        is_full = self._attention == "full"
        packed = behind_prefixes(
            rows,
            [prefixes[text].ids for text in text_of_row.tolist()],
            np.arange(len(text_of_row))
            if is_full
            else np.array([text.window for text in texts], np.int64)[text_of_row],
            is_pooled=self._pool_prefix,
            has_cls=self._cls_id is not None,
        )
        return replace(packed, pooled_row_M=rows.pooled_row) if is_full else packed, text_of_chunk

    def _laid_out(self, ids_T: Int32[np.ndarray, " T"], chunks: Chunks) -> Rows:
        """Lay out chunks as an ingest with this attention does; windows of full attention do not overlap."""
        longest_row = 2 + int(np.diff(chunks.token_offsets).max(initial=0))
        return lay_out(
            ids_T,
            chunks,
            attention="full" if self._attention == "full" else "chunk",
            cls_id=self._cls_id,
            landmark_id=self._landmark_id,
            pooling=self._pooling,
            max_window_tokens=max(longest_row, self._window_tokens - self.prefix_tokens),
        )


def behind_prefixes(
    rows: Rows,
    prefixes: Sequence[Int32[np.ndarray, " _"]],
    windows_B: Int64[np.ndarray, " B"],
    *,
    is_pooled: bool,
    has_cls: bool = True,
) -> PackedRows:
    """Put a prefix behind the [CLS] of each row, as :func:`lay_out` has one.

    With a prefix that is not pooled [CLS] is not pooled either, unless it is all that is.
    """
    lengths_B, num_prefix_B = np.diff(rows.row_offsets), np.array([len(ids) for ids in prefixes], np.int64)
    starts_B = rows.row_offsets[:-1] + np.cumsum(num_prefix_B) - num_prefix_B
    ids = np.empty(int((lengths_B + num_prefix_B).sum()), np.int32)
    is_prefix = np.zeros(len(ids), np.bool_)
    is_prefix[ranges(starts_B + has_cls, num_prefix_B)] = True
    ids[is_prefix], ids[~is_prefix] = np.concatenate([np.zeros(0, np.int32), *prefixes]), rows.ids
    num_prefix_M = num_prefix_B[rows.pooled_row]
    is_cls_M = rows.pooled_end <= has_cls
    is_whole_M = is_cls_M | is_pooled | (num_prefix_M == 0)
    first_M = np.where(is_whole_M, 0, has_cls + num_prefix_M)
    return PackedRows(
        ids_N=ids,
        lengths_B=lengths_B + num_prefix_B,
        windows_B=windows_B,
        pooled_start_B=np.where(rows.pooled_start > 0, rows.pooled_start + num_prefix_M, first_M),
        pooled_end_B=np.where(is_cls_M, rows.pooled_end, rows.pooled_end + num_prefix_M),
        num_prefix_B=num_prefix_B,
        has_cls=has_cls,
    )


def split_rows(rows: PackedRows, max_tokens: int) -> tuple[PackedRows, ...]:
    """Cut rows into micro-batches of whole windows with at most so many tokens.

    A longer window is one by itself.
    """
    window_starts = np.flatnonzero(np.diff(rows.windows_B, prepend=rows.windows_B[0] - 1))
    token_ends = np.cumsum(rows.lengths_B)
    parts: list[PackedRows] = []
    first = 0
    for start, end in zip(window_starts.tolist(), [*window_starts[1:].tolist(), len(rows)], strict=True):
        if start > first and token_ends[end - 1] - (token_ends[first] - rows.lengths_B[first]) > max_tokens:
            parts.append(_take(rows, first, start))
            first = start
    return (*parts, _take(rows, first, len(rows)))


def _take(rows: PackedRows, first: int, end: int) -> PackedRows:
    offsets = np.concatenate([[0], np.cumsum(rows.lengths_B)])
    part = chunks = slice(first, end)
    if rows.pooled_row_M is not None:
        chunks = slice(*np.searchsorted(rows.pooled_row_M, [first, end]))
    return PackedRows(
        ids_N=rows.ids_N[offsets[first] : offsets[end]],
        lengths_B=rows.lengths_B[part],
        windows_B=rows.windows_B[part],
        pooled_start_B=rows.pooled_start_B[chunks],
        pooled_end_B=rows.pooled_end_B[chunks],
        num_prefix_B=None if rows.num_prefix_B is None else rows.num_prefix_B[part],
        pooled_row_M=None if rows.pooled_row_M is None else rows.pooled_row_M[chunks] - first,
        has_cls=rows.has_cls,
    )
