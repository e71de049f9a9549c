"""How probable it is that a hit answers its query.

A hit's ``score`` is relative to the best possible for its query: the first hit of nonsense scores as high as
that of a question. Its MaxSim, or its cosine where no token vectors judged, tells them apart, on a scale that
differs with model and corpus. Two groups of queries measure that scale in each collection:

    general questions, which few corpora answer          median of their best hits' raw scores      z = 0
    known items: first sentences of its own documents    median of these documents' raw scores      z = 1

    P(hit answers) = 1 / (1 + exp(-SLOPE · (z - MIDDLE)))

Source: Platt 1999, "Probabilistic Outputs for Support Vector Machines". The two numbers were fitted on judged
sets (docs/measurements.md) and are the same for all collections.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.queries import leading_sentence
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.types import SearchResult
from jaxtyping import Int64

SLOPE: Final = 10.0
MIDDLE: Final = 0.43
NUM_KNOWN_ITEMS: Final = 64
READ_DOCUMENTS: Final = 256
"""Documents that are looked at, at most, for a sentence to ask by: those whose ids have the least hashes."""
READ_AT_ONCE: Final = 16
BLOCK_IDS: Final = 65_536
"""Ids that are made texts at once, about 5 MB."""
MIN_KNOWN_ITEMS: Final = 8
MIN_CHARACTERS: Final = 20
"""A shorter first sentence is a heading or a name that many documents share."""
RAW_SCORES: Final = ("late", "chunk", "document")
"""Scores that do not depend on the other candidates, the one that tells most first."""
GENERAL_QUESTIONS: Final = (
    "asdf qwer zxcv",
    "how long should a boiled egg cook",
    "who won the football world cup in 1998",
    "what is the capital of Mongolia",
    "how do I change a flat bicycle tyre",
    "symptoms of vitamin D deficiency",
    "best time of year to plant tomatoes",
    "why is the sky blue",
    "rules of castling in chess",
    "how to tune a guitar by ear",
    "cheap hotels near the beach in Portugal",
    "history of the Ottoman Empire",
    "how to train a puppy not to bite",
    "how to remove red wine stains",
    "who painted the Mona Lisa",
    "when was the printing press invented",
    "recipe for sourdough bread",
    "average rainfall in the Sahara",
    "what causes earthquakes",
    "train from Vienna to Prague on Sunday",
    "how to negotiate a salary",
    "meaning of the word serendipity",
    "who wrote Don Quixote",
    "python list comprehension with a condition",
)
NOT_CALIBRATED: Final = (
    f"min_probability was not applied: at least {MIN_KNOWN_ITEMS} documents must begin with a sentence of "
    f"{MIN_CHARACTERS} characters, be found by it, and score above the best answers to general questions"
)
BEING_MEASURED: Final = "min_probability was not applied: the collection is being measured; ask again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The raw scores that mean z = 0 and z = 1 in a collection of ``num_documents``, by their names."""

    scales: Mapping[str, tuple[float, float]]
    num_documents: int

    def holds_for(self, num_documents: int) -> bool:
        """Tell whether the collection still has about the size it was measured at."""
        return self.num_documents / 2 <= num_documents <= 2 * self.num_documents

    def probability(self, scores: Mapping[str, float]) -> float | None:
        """Return the probability that a hit with these parts answers; None where no part was measured."""
        for name in RAW_SCORES:
            if name in scores and name in self.scales:
                low, high = self.scales[name]
                logit = SLOPE * ((scores[name] - low) / (high - low) - MIDDLE)
                return 1.0 / (1.0 + math.exp(min(-logit, 500.0)))
        return None

    def apply(self, result: SearchResult, least: float) -> SearchResult:
        """Give every hit its ``probability``, and leave out those below ``least``."""
        found = [(hit, self.probability(hit.scores)) for hit in result.hits]
        if any(probability is None for _, probability in found):
            return replace(result, warnings=(*result.warnings, NOT_CALIBRATED))
        hits = (
            replace(hit, scores={**hit.scores, "probability": probability})
            for hit, probability in found
            if probability is not None and probability >= least
        )
        return replace(result, hits=tuple(hits))

    @classmethod
    def of(
        cls,
        off_topic: list[SearchResult],
        known: Mapping[str, SearchResult],
        num_documents: int,
    ) -> Calibration:
        """Measure the scales; ``known`` are the answers to known items by the id of their document."""
        own = [hit.scores for doc_id, result in known.items() for hit in result.hits if hit.doc_id == doc_id]
        best = [result.hits[0].scores for result in off_topic if result.hits]
        scales: dict[str, tuple[float, float]] = {}
        for name in RAW_SCORES:
            low, high = ([scores[name] for scores in group if name in scores] for group in (best, own))
            if low and len(high) >= MIN_KNOWN_ITEMS and np.median(high) > np.median(low):
                scales[name] = float(np.median(low)), float(np.median(high))
        return cls(scales=scales, num_documents=num_documents)


def known_items(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return first sentences of documents by their ids, none twice; no more are read than are asked."""
    found: dict[str, str] = {}
    for doc_id, text in texts:
        sentence = leading_sentence(text)
        if len(sentence) >= MIN_CHARACTERS:
            found.setdefault(sentence, doc_id)
        if len(found) == NUM_KNOWN_ITEMS:
            break
    return {doc_id: sentence for sentence, doc_id in found.items()}


def measured(
    generation: Generation,
    allowed: Int64[np.ndarray, " A"],
    ask: Callable[[Sequence[str]], list[SearchResult]],
) -> Calibration:
    """Ask a collection general questions and first sentences of its own documents."""
    known = known_items(_spread_texts(generation, allowed))
    answers = ask([*GENERAL_QUESTIONS, *known.values()])
    off_topic, own = answers[: len(GENERAL_QUESTIONS)], answers[len(GENERAL_QUESTIONS) :]
    return Calibration.of(off_topic, dict(zip(known, own, strict=True)), len(allowed))


def _spread_texts(generation: Generation, allowed: Int64[np.ndarray, " A"]) -> Iterator[tuple[str, str]]:
    """Yield ids and texts of some documents, drawn by their ids, reading a few at a time.

    A collection is measured alike in any number of partitions, whatever order its documents came in.
    """
    doc_ids = generation.doc_ids.take(pa.array(allowed))
    blocks = (doc_ids.slice(first, BLOCK_IDS).to_pylist() for first in range(0, len(allowed), BLOCK_IDS))
    hashes = (zlib.crc32(doc_id.encode()) for block in blocks for doc_id in block)
    hash_A = np.fromiter(hashes, np.uint32, len(allowed))
    last = min(len(allowed), READ_DOCUMENTS) - 1
    drawn = np.flatnonzero(hash_A <= np.partition(hash_A, last)[last]) if len(allowed) else allowed
    ordered = sorted(drawn.tolist(), key=lambda place: (hash_A[place], doc_ids[place].as_py()))
    places = allowed[ordered[:READ_DOCUMENTS]]
    for first in range(0, len(places), READ_AT_ONCE):
        for row in read_rows(generation, places[first : first + READ_AT_ONCE], ["doc_id", "text"]):
            yield row["doc_id"], row["text"]
