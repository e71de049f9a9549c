"""From pairs to the rows of a batch: neighbouring documents of one title, each cut by an interval.

    unit       neighbouring pairs of one title: documents d1 d2 d3 …, each once, and the queries they answer
    chunk      [CLS] (title [LMK]) z1 [LMK] · [CLS] (title [LMK]) z2 [LMK] · …      a row a chunk
    full       [CLS] (title [LMK]) z1 [LMK] z2 [LMK] …                              a row a document
    query      [CLS] q [LMK]      pooled alike
    prefix     [CLS] prefix z [LMK]   of queries and of documents, in every row; read, and not pooled

Every document of a batch is a candidate for every query, so the other documents of its own unit are among a
query's negatives: a vector has to say what stands in its document, and not what all of its title have in
common.

Source: LMK pooling §4, variable chunking, an interval drawn for each unit. Differs: documents are neighbours
of one file, not drawn at random, and the loss is CDE's. Instructions stand before queries and are masked from
pooling as in NV-Embed, §4, eq. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.tokenization import Prefix, instruction_prefix, tokenize
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.pairs import Candidates, TrainingPairs
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.landmarks import Rows, lay_out, split_into_chunks
from cairn.pipeline.ragged import ranges
from jaxtyping import Int64
from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceBatch:
    """Rows of a batch and what they are for.

    Texts are numbered queries first, then documents; ``text_B`` is each chunk's. ``positive_Q`` counts
    documents only, ``pair_Q`` and ``pair_D`` are positions of training pairs: those of the queries, and for
    each document one whose document it is.
    """

    rows: Rows
    text_B: Int64[np.ndarray, " M"]
    pair_Q: Int64[np.ndarray, " Q"]
    pair_D: Int64[np.ndarray, " documents"]
    positive_Q: Int64[np.ndarray, " Q"]


class _Text(NamedTuple):
    text: str
    interval: int
    max_tokens: int
    prefix: str = ""
    title: str = ""


def make_units(
    pairs: TrainingPairs, positions: Sequence[int], sequence_documents: int
) -> tuple[tuple[int, ...], ...]:
    """Cut pairs into runs of one source and page, and these into units of ``sequence_documents``.

    Runs keep the order of the pairs. Pairs that follow one another with the same document stay together:
    their queries share a segment. Documents of no page are units of their own.
    """
    units: list[list[int]] = []
    seen: set[str] = set()
    origin: tuple[str, str] | None = None
    for position in positions:
        row = pairs.rows[position]
        most = sequence_documents if row.page else 1
        if (row.source, row.page) != origin or (row.document not in seen and len(seen) == most):
            origin, seen = (row.source, row.page), set()
            units.append([])
        seen.add(row.document)
        units[-1].append(position)
    return tuple(map(tuple, units))


def in_order_of_content(pairs: TrainingPairs) -> TrainingPairs:
    """Sort by a hash of their texts what :func:`make_units` may join, each such run as it stands."""
    rows = pairs.rows
    runs = make_units(pairs, range(len(pairs)), len(pairs))
    # A page may be a number by the order of files.
    order = hash_order([repr(rows[run[0]]._replace(page="")) for run in runs], 0)
    return replace(pairs, rows=tuple(rows[place] for run in order.tolist() for place in runs[run]))


def units_of_a_batch(units: Sequence[Sequence[int]], batch_pairs: int) -> int:
    """Return how many units make a batch of about so many pairs."""
    return max(1, round(batch_pairs * len(units) / sum(map(len, units))))


class SequenceMaker:
    """Lays batches out for one model as it will be ``served``; reads texts, draws nothing."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pairs: TrainingPairs,
        served: EncoderConfig,
        *,
        max_query_tokens: int,
        max_document_tokens: int,
    ) -> None:
        self._tokenizer: Tokenizer = checkpoint.tokenizer
        self._cls_id, self._landmark_id = checkpoint.cls_id, checkpoint.landmark_id
        self._pairs = pairs
        self._served = served
        self._max_query_tokens, self._max_document_tokens = max_query_tokens, max_document_tokens
        self._candidates = Candidates.of(pairs)
        instructions = {instruction_prefix(row.instruction) for row in pairs.rows if row.instruction}
        used = {served.query_prefix, served.document_prefix, "", *instructions}
        self._prefixes = {text: Prefix.of(text, self._tokenizer) for text in sorted(used)}

    @property
    def prefix_tokens(self) -> int:
        """Return the tokens of the longest prefix, which every row must have room for."""
        return max(len(prefix.ids) for prefix in self._prefixes.values())

    def longest_chunk(self, max_positions: int) -> int:
        """Return how many tokens a chunk may have beside [CLS], prefix, title and landmarks."""
        title_tokens = self._served.title_tokens
        return max_positions - 2 - self.prefix_tokens - title_tokens - (title_tokens > 0)

    def require_room(self, max_positions: int) -> None:
        """Raise :class:`ConfigError` where prefix and title leave no room for a text."""
        if self.longest_chunk(max_positions) < 1:
            raise ConfigError(
                "prefixes, instructions and title_tokens must leave a text room in the model's "
                f"{max_positions} positions, got {self.prefix_tokens} and {self._served.title_tokens}; "
                "shorten them"
            )

    def _query(self, position: int, interval: int) -> _Text:
        row = self._pairs.rows[position]
        prefix = instruction_prefix(row.instruction) if row.instruction else self._served.query_prefix
        return _Text(row.query, interval, self._max_query_tokens, prefix)

    def _document(self, place: int, interval: int, *, shows_title: bool) -> _Text:
        has_title = shows_title and place < len(self._pairs)
        title = self._pairs.rows[place].title.strip() if has_title else ""
        text, most = self._candidates.texts[place], self._max_document_tokens
        return _Text(text, interval, most, self._served.document_prefix, title)

    def make(
        self,
        units: Sequence[Sequence[int]],
        intervals_U: Int64[np.ndarray, " U"],
        has_title_U: np.ndarray,
        negatives: Sequence[int] = (),
        negative_interval: int = 64,
    ) -> SequenceBatch:
        """Lay out the units' queries and documents, and behind them the candidates that are ``negatives``."""
        queries: list[_Text] = []
        documents: list[_Text] = []
        pair_D: list[int] = []
        positive_Q: list[int] = []
        drawn = zip(units, intervals_U.tolist(), has_title_U.tolist(), strict=True)
        for positions, interval, shows_title in drawn:
            numbers: dict[str, int] = {}
            for position in positions:
                queries.append(self._query(position, interval))
                document = self._pairs.rows[position].document
                if document not in numbers:
                    numbers[document] = len(pair_D)
                    documents.append(self._document(position, interval, shows_title=shows_title))
                    pair_D.append(position)
                positive_Q.append(numbers[document])
        for position in negatives:
            shows_title = bool(has_title_U[0])
            documents.append(self._document(position, negative_interval, shows_title=shows_title))
            pair_D.append(position)
        rows, text_B = self._rows([*queries, *documents])
        return SequenceBatch(
            rows=rows,
            text_B=text_B,
            pair_Q=np.array([position for unit in units for position in unit], np.int64),
            pair_D=np.array(pair_D, np.int64),
            positive_Q=np.array(positive_Q, np.int64),
        )

    def context(self, positions: Sequence[int], max_tokens: int) -> Rows:
        """Lay out the openings of these pairs' documents as the first stage reads them, without a prefix."""
        own_tokens = max_tokens - (1 if self._cls_id is None else 2)
        texts = [_Text(self._candidates.texts[position], max_tokens, own_tokens) for position in positions]
        return self._rows(texts)[0]

    def queries(self, positions: Sequence[int], interval: int) -> tuple[Rows, Int64[np.ndarray, " M"]]:
        """Lay out these pairs' queries, and the query each chunk is of."""
        return self._rows([self._query(position, interval) for position in positions])

    def documents(self, positions: Sequence[int], interval: int) -> tuple[Rows, Int64[np.ndarray, " M"]]:
        """Lay out these pairs' documents as they are served, and the document each chunk is of."""
        return self._rows([self._document(position, interval, shows_title=True) for position in positions])

    def _rows(self, texts: Sequence[_Text]) -> tuple[Rows, Int64[np.ndarray, " M"]]:
        """Return the rows of texts, each cut after its limit, and for each chunk the place of its text."""
        prefixes = [self._prefixes[text.prefix] for text in texts]
        written = [prefix.continued(text.text) for text, prefix in zip(texts, prefixes, strict=True)]
        tokens = tokenize(self._tokenizer, written)
        most, intervals = np.array([(each.max_tokens, each.interval) for each in texts], np.int64).T
        lengths = np.minimum(np.diff(tokens.text_offsets), most)
        kept = ranges(tokens.text_offsets[:-1], lengths)
        chunks = split_into_chunks(tokens.breaks[kept], np.concatenate([[0], np.cumsum(lengths)]), intervals)
        titles = tokenize(self._tokenizer, [each.title for each in texts])
        of_titles = np.split(titles.ids, titles.text_offsets[1:-1])
        title_ids = [ids[: self._served.title_tokens] for ids in of_titles]
        longest_row = 3 + int(np.diff(chunks.token_offsets).max(initial=0)) + max(map(len, title_ids))
        # As an ingest with this attention does; windows of full attention do not overlap.
        rows = lay_out(
            tokens.ids[kept],
            chunks,
            attention=self._served.attention,
            cls_id=self._cls_id,
            landmark_id=self._landmark_id,
            pooling=self._served.pooling,
            max_window_tokens=max(longest_row + self.prefix_tokens, self._served.window_tokens),
            prefix_ids=[prefix.ids for prefix in prefixes],
            pool_prefix=self._served.pool_prefix,
            titles=title_ids,
        )
        return rows, np.repeat(np.arange(len(texts)), np.diff(chunks.chunk_offsets))
