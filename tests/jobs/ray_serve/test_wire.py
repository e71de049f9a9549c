"""Messages to shards as bytes: what comes back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.jobs.ray_serve.wire import pack, unpack
from cairn.pipeline.errors import CairnError, DamageError, StorageError
from cairn.pipeline.lexical.bm25 import Totals
from cairn.pipeline.search.fusion import LateQuery
from cairn.pipeline.search.reader import MatchesAsked, PassagesRead, TokenMatches, WindowScores
from cairn.pipeline.search.shards.parts import (
    BestWords,
    MetDocuments,
    PartFacts,
    PartFound,
    PartKey,
    PartScores,
    ScoredAtOnce,
    SearchAsked,
    Words,
    WordTotals,
)

VECTOR = np.linspace(-1.0, 1.0, 7, dtype=np.float32)
PLACES = np.array([3, 1 << 40, 0])
NONE = np.empty(0, np.int64)
TOTALS = Totals(texts=3, length=11, holding={"caf\u00e9": 2, "\ud800": 1})
WORDS = Words(
    query='a "query"\n',
    totals=WordTotals(documents=(TOTALS, TOTALS), passages={2: (TOTALS, TOTALS)}),
    size=2,
)
LATE = LateQuery(vectors_qV=VECTOR[None].repeat(2, 0), weights_q=VECTOR[:2], places_q=PLACES[:2])
WINDOWS = WindowScores(cosine_W=VECTOR, words_W=None)
SCORES = PartScores(
    documents=PLACES, document_N=VECTOR, chunk_N=None, word_N=VECTOR, passage_N=VECTOR[:0], windows=WINDOWS
)
ROWS = pa.table({"doc_id": ["a", None, "ü"], "when": pa.array([1, 2, 3], pa.timestamp("us"))})
FOUND = PartFound(
    num_chunks=9,
    met=MetDocuments(documents=PLACES, firsts=PLACES, ends=PLACES),
    documents=(PLACES, VECTOR[::-1]),
    chunks=None,
    words=BestWords(documents=(PLACES, VECTOR[:3]), passages=(NONE, VECTOR[:0]), highs={1: 0.1, 20: np.inf}),
    scored=SCORES,
)
ASKED = SearchAsked(
    vector_V=VECTOR,
    num_documents=5,
    num_chunks=None,
    allowed=NONE,
    words=WORDS,
    num_best=5,
    scored=ScoredAtOnce(parts=["document"], size=2, share=0.25, others=PLACES),
)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        found += 1  # may be written to
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for one, other in zip(found.values(), expected.values(), strict=True):
            assert_same(one, other)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize(
    "message",
    [
        (PartKey("docs", 3, "ab", 1, 2), "search", (ASKED,)),
        FOUND,
        SCORES,
        (LATE, PLACES, NONE, 3, True, None, 1e-320, [1, [2]]),
        TokenMatches(
            size_C=PLACES,
            cosine_Tq=np.ones((2, 3), np.float32).T,
            step_T=np.arange(3, dtype=np.uint8),
            start_C=PLACES,
        ),
        PartFacts(
            num_documents=3,
            num_chunks=9,
            rows=ROWS.slice(0, 0),
            has_tokens=True,
            has_sparse=False,
            missing={"00000001-0002": "it is gone"},
        ),
        MatchesAsked(chunk_M=PLACES, title_N=NONE, query=LATE),
        PassagesRead(ROWS, PLACES, PLACES),
        np.empty((0, 4), np.float32),
    ],
)
def test_message_comes_back_as_it_was(message: Any) -> None:
    for payload in (pack(message), bytearray(pack(message))):
        assert_same(unpack(payload), message)


def test_error_comes_back_with_its_command() -> None:
    damage = DamageError("a file must be whole", verb="verify")
    damage.command = "cairn verify docs"
    for error in (damage, StorageError("storage failed"), CairnError()):
        found = unpack(pack(error))
        assert type(found) is type(error)
        assert str(found) == str(error)


@pytest.mark.parametrize("value", [object(), np.array(["a", None], object), b"bytes", {1, 2}, 1j])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a message must hold numbers"):
        pack([value])


@pytest.mark.parametrize(
    "plain",
    [
        ["array", "|O", 1],
        ["array", "<f4", 1_000],
        ["message", "Path", "/"],
        ["error", "KeyboardInterrupt", "", {}],
        ["message", "PartKey", "too few"],
    ],
)
def test_message_of_a_stranger_makes_nothing_else(plain: Any) -> None:
    text = json.dumps(plain).encode()
    with pytest.raises((ValueError, KeyError)):
        unpack(len(text).to_bytes(8, "big") + text + bytes(64))
