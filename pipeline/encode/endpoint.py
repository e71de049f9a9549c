"""Documents and queries through an embeddings endpoint: chunks are cut here, a server gives their vectors.

    texts ─▶ chunks ─▶ prefix + title + chunk ─▶ batches by tokens ─▶ many requests at once ─▶ unit vectors
                                                        │
                                                 paid.sqlite: what was answered, by the hash of what was asked

The packaged model's tokenizer cuts texts and counts their tokens. A server gives one vector a text and shows
no states of tokens, so there are no windows, and token vectors only of the packaged model, where they are
asked for; a contextual API reads the chunks of a document together, and its context is its own.

A model behind a name can change without notice. Vectors of fixed texts are drawn with a collection, stored
with its context and hashed into its fingerprint. One of the texts goes along with every request for
documents; all are asked for before documents or queries are encoded, and from time to time while queries are.
A server that gives other vectors is refused, and nothing of that answer is kept. Two answers of one model
differ by rounding, hence a cosine and no hash.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.describe import Describer, require_describer
from cairn.pipeline.encode.documents import (
    EncodedDocuments,
    TokenReader,
    cut_into_chunks,
    document_vectors,
    first_tokens,
    hashed_settings,
    shown_chunks,
)
from cairn.pipeline.encode.endpoint_requests import (
    CLOSE_SECONDS,
    INGEST,
    QUERY,
    Address,
    Endpoint,
    Patience,
    Unit,
    Vectors,
)
from cairn.pipeline.encode.paid import PaidAnswers
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import CairnError, ConfigError, EndpointDownError, FingerprintMismatchError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.checkpoint import read_tokenizer
from cairn.pipeline.model.folders.names import embedded_folder
from cairn.pipeline.model.landmarks import chunk_spans
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import QueryTokens
from jaxtyping import Float32, Int64
from tokenizers import Tokenizer

log = logging.getLogger(__name__)

ENDPOINT_VERSION: Final = 1
"""Raised when the same settings begin to send other texts."""

PROBES: Final = (
    "The harbour freezes in January, and the ferry stays on the other side.",
    "def total(prices): return sum(price for price in prices if price > 0)",
    "Welche Unterlagen brauche ich, um eine Wohnung anzumelden?",
    "0.4 mm of play at the bearing is within the limits given in table 7.",
)
"""Texts whose vectors tell a model from another one: prose, code, another language, numbers."""
LEAST_COSINE: Final = 0.995
"""Between two answers for a probe. Rounding of bf16 leaves .999; another model has below .98."""
CHECK_SECONDS: Final = 600.0
"""How long a model is believed to be the one it was where no probe goes along."""
OUTAGE_SECONDS: Final = 15.0
"""How long an outage is believed to last before the endpoint is asked again."""

BATCH_TEXTS: Final = 31
"""With a probe 32, what every server takes: TEI takes no more by default, and more is hardly faster."""
BATCH_TOKENS: Final = 8_192
UNIT_TOKENS: Final = 16_000
"""Of a document, what a contextual API reads together: half of what it takes, by another tokenizer."""

_UNSUPPORTED: Final = (
    "pooling", "attention", "layers", "causal", "pool_prefix", "temperature", "query_temperature",
    "use_context", "document_context", "precision", "backend",
)  # fmt: skip
"""Settings of what a backbone does, which nothing can do for a vector that a server made."""


def require_endpoint_fit(config: EncoderConfig) -> Address:
    """Return where the endpoint is; raise :class:`ConfigError` for settings that it cannot have."""
    default = EncoderConfig()
    for name in _UNSUPPORTED:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name} must go with a model that runs here, got it with an endpoint, which gives vectors "
                "and shows no states of tokens; leave it out"
            )
    require_describer(config)
    return Address.of(config.model)


class EndpointEncoder:
    """One of :mod:`cairn.pipeline.encode.encoder`; asks nothing of the server before it is used.

    ``context`` brings the vectors of probes that a collection was begun with; without one they are drawn.
    ``patience`` is for documents, an ingest's where it is None; queries have their own.
    """

    def __init__(
        self,
        config: EncoderConfig,
        context: ContextSet | None = None,
        patience: Patience | None = None,
        token_codebook: TokenCoder | None = None,
    ) -> None:
        self._patience = patience or INGEST
        self.token_codebook, self._tokens = token_codebook, TokenReader(config, token_codebook)
        self._address = require_endpoint_fit(config)
        self.config = config
        self._endpoint = Endpoint(self._address, dims=config.dims, num_requests=config.endpoint_requests)
        self._stored_probes_PV = None if context is None else context.probes_PV
        if self._stored_probes_PV is not None:
            self._endpoint.width = self._stored_probes_PV.shape[1]
        self._paid = PaidAnswers()
        self._describer = Describer.of(config, patience)
        self._cutting = threading.Lock()
        self._turns = cycle(range(len(PROBES)))
        self._checked_at: float | None = None
        self._outage: str | None = None
        self._outage_at = 0.0

    @cached_property
    def backbone(self) -> Backbone:
        """The packaged model, for those who cut texts by a backbone; loaded when it is asked for."""
        return load_backbone(EncoderConfig())

    @property
    def reads_titles(self) -> bool:
        """Say whether a document's title moves its vectors."""
        return self.config.title_tokens > 0 or self._describer is not None or self.config.token_bytes > 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The packaged model's, which cuts texts into chunks and counts their tokens."""
        return read_tokenizer(embedded_folder() / "tokenizer.json")

    @property
    def probes_PV(self) -> Float32[np.ndarray, "P V"]:  # noqa: N802 - shapes have capital letters
        """The vectors of :data:`PROBES` that the space is known by."""
        if self._stored_probes_PV is None:
            self.check()
        assert self._stored_probes_PV is not None, "a check draws them"
        return self._stored_probes_PV

    @property
    def vector_dim(self) -> int:
        """The width of the vectors."""
        return self.probes_PV.shape[1]

    @cached_property
    def fingerprint(self) -> str:
        """The name of the model, what is sent to it, and how it answers probes; not where it runs."""
        return fingerprint(
            kind="endpoint",
            format=ENDPOINT_VERSION,
            name=self._address.name,
            is_contextual=self._address.is_contextual,
            probes=hashlib.sha256(np.ascontiguousarray(self.probes_PV).tobytes()).hexdigest(),
            **hashed_settings(self.config),
            **self._tokens.hashed,
        )

    @property
    def outage(self) -> str | None:
        """Why the endpoint could not be asked last; after some seconds another thread asks it again."""
        told = self._outage
        if told is not None and time.monotonic() - self._outage_at > OUTAGE_SECONDS:
            self._outage_at = time.monotonic()
            threading.Thread(target=self.check_quietly, name="cairn-endpoint-check", daemon=True).start()
        return told

    def check(self, patience: Patience | None = None) -> None:
        """Ask for the probes; raise :class:`FingerprintMismatchError` for other vectors than before.

        It has the patience for documents, unless it is told another one.
        """
        self._endpoint.run(self._check(patience or self._patience))

    async def _check(self, patience: Patience) -> None:
        vectors = await self._ask_noting([(text,) for text in PROBES], patience, is_query=False)
        found_PV = np.concatenate(vectors)
        if self._stored_probes_PV is None:
            self._stored_probes_PV = found_PV
        cosine = float((found_PV * self._stored_probes_PV).sum(axis=1).min())
        if cosine < LEAST_COSINE:
            raise self._other_model(cosine)
        self._checked_at = time.monotonic()

    def _other_model(self, cosine: float) -> FingerprintMismatchError:
        return FingerprintMismatchError(
            f"the endpoint {self._address.describe()} must give the vectors it gave before, got others "
            f"for the same texts (cosine {cosine:.3f}): the model behind the name has changed; have it "
            "served again, or use a new collection"
        )

    def check_quietly(self) -> None:
        """Check, and leave an outage to be told by :attr:`outage`."""
        try:
            self.check(QUERY)
        except CairnError as error:
            self._note(str(error))

    def encode(
        self,
        texts: Sequence[str],
        on_tokens: Callable[[int], None] | None = None,
        *,
        titles: Sequence[str | None] | None = None,
    ) -> EncodedDocuments:
        """Encode texts in the order given; what was answered is kept where :meth:`keep_paid` says."""
        self._endpoint.run(self._check_if_due(self._patience))
        with self._cutting:  # on all cores, so that the first of several calls soon has something to ask
            tokens = tokenize(self.tokenizer, texts)
        chunks = cut_into_chunks(self.config, tokens, texts)
        lengths_N = np.fromiter(map(len, texts), np.int64, len(texts))
        spans = np.stack(chunk_spans(chunks, tokens.start_char, lengths_N), axis=1)
        _, start_char, end_char = shown_chunks(chunks, tokens, texts)
        offsets = chunks.chunk_offsets
        num_tokens_M = np.diff(chunks.token_offsets)
        owners_M = np.repeat(np.arange(len(texts)), np.diff(offsets))
        heads = self._heads(titles, len(texts))
        lines = None
        if self._describer is not None:
            lines = self._describer.lines(texts, titles, offsets, start_char, end_char)
        own_lines = [f"{line}\n" if line else "" for line in lines or [""] * len(owners_M)]
        sent = [
            f"{self.config.document_prefix}{heads[owner]}{line}{texts[owner][start:end].strip() or '.'}"
            for owner, line, (start, end) in zip(owners_M.tolist(), own_lines, spans.tolist(), strict=True)
        ]
        bounds = self._unit_bounds(offsets, num_tokens_M)
        units = [tuple(sent[first:end]) for first, end in bounds]
        sizes = [int(num_tokens_M[first:end].sum()) for first, end in bounds]
        vectors = self._vectors(units, sizes, on_tokens)
        chunk_vectors_MV = np.concatenate([np.zeros((0, self.vector_dim), np.float32), *vectors])
        encoded = EncodedDocuments(
            document_vectors_NV=document_vectors(chunk_vectors_MV, offsets, "document"),
            num_tokens=np.diff(tokens.text_offsets).astype(np.int32),
            chunk_offsets=offsets,
            start_char=start_char,
            end_char=end_char,
            chunk_vectors_MV=chunk_vectors_MV,
            lines=lines,
        )
        with self._cutting:
            return self._tokens.with_codes(encoded, texts, titles, lambda _: self._endpoint.require_open())

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Encode queries behind their prefix within the deadline of a query."""
        if not texts:
            return np.zeros((0, self.vector_dim), np.float32)

        async def asked() -> Float32[np.ndarray, "Q V"]:
            await self._check_if_due(QUERY)
            units = [(self.config.query_prefix + text,) for text in texts]
            return np.concatenate(await self._ask_noting(units, QUERY, is_query=True))

        try:
            return self._endpoint.run(asked(), QUERY.total_seconds)
        except EndpointDownError as error:
            self._note(str(error))
            raise

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Encode queries; their tokens are read here where the documents' are, else there are none."""
        return self.encode_queries(texts), self._tokens.of_queries(texts)

    def keep_paid(self, path: Path | None) -> None:
        """Keep every answer in a file from here on, and ask for nothing that it holds; None ends that."""
        self._paid.close()
        self._paid = PaidAnswers(path)
        if self._describer is not None:
            self._describer.keep_paid(path)

    def seconds_a_token(self, chunk_tokens: int) -> float:
        """Time one request for a full batch of such chunks, of words that stand in no document.

        Others at the same time are taken to cost no more, which holds for a server with room to spare.
        """
        words = ("harbour", "bearing", "table", "ferry", "limit", "price")
        num_texts = max(1, min(BATCH_TEXTS, BATCH_TOKENS // chunk_tokens))
        batch = [
            (" ".join(words[(text * 7 + word) % 6] for word in range(chunk_tokens)),)
            for text in range(num_texts)
        ]
        started = time.monotonic()
        self._endpoint.run(self._endpoint.embed(batch, QUERY))
        seconds = time.monotonic() - started
        return seconds / (num_texts * chunk_tokens * self.config.endpoint_requests)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Keep what is answered within so many seconds, and close connections and files."""
        self._endpoint.close(seconds)
        if self._describer is not None:
            self._describer.close(seconds)
        self.keep_paid(None)

    def _heads(self, titles: Sequence[str | None] | None, num_texts: int) -> list[str]:
        """Return what stands before each chunk of a document: the first tokens of its title."""
        most = self.config.title_tokens
        if titles is None or not most:
            return [""] * num_texts
        cut = first_tokens(self.tokenizer, [(title or "").strip() for title in titles], most)
        return [f"{title}\n" if title else "" for title in cut]

    def _unit_bounds(
        self, offsets: Int64[np.ndarray, " N1"], num_tokens_M: Int64[np.ndarray, " M"]
    ) -> list[tuple[int, int]]:
        """Return which chunks are embedded together: each by itself, or a document's for a contextual API."""
        if not self._address.is_contextual:
            return [(chunk, chunk + 1) for chunk in range(len(num_tokens_M))]
        bounds: list[tuple[int, int]] = []
        for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            part = np.cumsum(num_tokens_M[first:end]) // UNIT_TOKENS
            cuts = [first, *(first + 1 + np.flatnonzero(np.diff(part))).tolist(), end]
            bounds += pairwise(cuts)
        return bounds

    def _vectors(
        self, units: Sequence[Unit], sizes: Sequence[int], on_tokens: Callable[[int], None] | None
    ) -> list[Float32[np.ndarray, "_ V"]]:
        """Return unit vectors, of what was paid for already from the file, of the rest from the server."""
        keys = [self._key(unit) for unit in units]
        places: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, place)
        num_asked = 0

        def count(batch: Sequence[int]) -> None:
            nonlocal num_asked
            num_tokens = sum(sizes[place] for place in batch)
            num_asked += num_tokens
            if on_tokens is not None:
                on_tokens(num_tokens)

        def ask(missing: Sequence[bytes]) -> dict[bytes, Float32[np.ndarray, "_ V"]]:
            calls = {
                tuple(batch): partial(self._ask, [(keys[place], units[place]) for place in batch])
                for batch in _batches([places[key] for key in missing], sizes)
            }
            answers = self._endpoint.side_by_side(calls, count)
            return {key: vectors for batch in answers.values() for key, vectors in batch.items()}

        found = self._paid.answers(places, ask, self._vectors_of)
        if on_tokens is not None and num_asked < sum(sizes):  # known, or of a text that stands twice
            on_tokens(sum(sizes) - num_asked)
        return [found[key] for key in keys]

    def _vectors_of(self, content: bytes) -> Float32[np.ndarray, "_ V"]:
        return np.frombuffer(content, np.float32).reshape(-1, self.vector_dim)

    async def _ask(
        self, batch: Sequence[tuple[bytes, Unit]], *, is_again: bool = False
    ) -> dict[bytes, Float32[np.ndarray, "_ V"]]:
        """Ask for a batch beside a probe, and keep what each request brings.

        What comes with another model's probe is not kept, even if the next request is answered by the right
        one, as where only one of several servers behind an address is wrong: it is asked for once more.
        """
        probe = next(self._turns)
        units, left = [unit for _, unit in batch], iter(batch)
        found: dict[bytes, Float32[np.ndarray, "_ V"]] = {}
        async for vectors, beside in self._endpoint.parts(units, self._patience, beside=[(PROBES[probe],)]):
            asked = list(islice(left, len(vectors)))
            cosine = float(beside[0][0] @ self.probes_PV[probe]) if beside else 1.0
            if cosine < LEAST_COSINE:
                if is_again:
                    raise self._other_model(cosine)
                await self._check(self._patience)  # before another batch is paid for
                found |= await self._ask(asked, is_again=True)
                continue
            part = {key: each for each, (key, _) in zip(vectors, asked, strict=True)}
            self._paid.keep({key: np.ascontiguousarray(each).tobytes() for key, each in part.items()})
            found |= part
        return found

    async def _ask_noting(self, units: Sequence[Unit], patience: Patience, *, is_query: bool) -> Vectors:
        """Ask, and note whether the endpoint answers."""
        try:
            vectors = await self._endpoint.embed(units, patience, is_query=is_query)
        except CairnError as error:
            self._note(str(error) if isinstance(error, EndpointDownError) else error.fault)
            raise
        self._outage = None
        return vectors

    def _note(self, sentence: str) -> None:
        if self._outage is None:
            log.info("endpoint.no_vectors sentence=%s", sentence)
        self._outage, self._outage_at = sentence, time.monotonic()

    async def _check_if_due(self, patience: Patience) -> None:
        async with self._endpoint.checking:
            at = self._checked_at
            if at is None or time.monotonic() - at > CHECK_SECONDS:
                await self._check(patience)

    def _key(self, unit: Unit) -> bytes:
        asked = hashlib.sha256(self.fingerprint.encode())
        for text in unit:
            asked.update(hashlib.sha256(text.encode()).digest())
        return asked.digest()


def _batches(places: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Group units into requests of at most so many units and tokens; a larger unit goes alone."""
    batch: list[int] = []
    num_tokens = 0
    for place in places:
        if batch and (len(batch) == BATCH_TEXTS or num_tokens + sizes[place] > BATCH_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(place)
        num_tokens += sizes[place]
    if batch:
        yield batch


def with_probes(context: ContextSet, config: EncoderConfig, patience: Patience | None = None) -> ContextSet:
    """Return a context with the vectors of probes that an endpoint's collection is known by."""
    with closing(EndpointEncoder(config, patience=patience)) as encoder:
        return replace(context, probes_PV=encoder.probes_PV)
