"""Messages to shards as bytes: what comes back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.jobs.ray_serve.wire import pack, unpack
from cairn.pipeline.errors import CairnError, DamageError, StorageError
from cairn.pipeline.lexical.bm25 import Totals
from cairn.pipeline.search.reader import PassagesRead
from cairn.pipeline.search.shards.parts import PartKey

PLACES = np.array([3, 1 << 40, 0])
TOTALS = Totals(texts=3, length=11, holding={"caf\u00e9": 2, "\ud800": 1})
ROWS = pa.table({"doc_id": ["a", None, "ü"], "when": pa.array([1, 2, 3], pa.timestamp("us"))})


def test_message_comes_back_as_it_was_with_arrays_to_write_to() -> None:
    """What searches send is held by all tests of shards: they ask theirs in these bytes."""
    arrays = [
        PLACES,
        np.linspace(-1.0, 1.0, 7, dtype=np.float32)[::-1],
        np.ones((2, 3), np.float32).T,
        np.arange(3, dtype=np.uint8),
        np.empty((0, 4), np.float32),
    ]
    plain = ['a "query"\n', 3, True, None, 1e-320, np.inf, (1, [2], {1: 0.1, 20: TOTALS})]
    message = (PartKey("docs", 3, "ab", 1, 2), plain, arrays, PassagesRead(ROWS, PLACES, PLACES))
    for payload in (pack(message), bytearray(pack(message))):
        key, found, read, rows = unpack(payload)
        assert (key, found) == message[:2]
        assert type(key) is PartKey
        for one, other in zip(read, arrays, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
            one += 1
        assert rows.table.equals(ROWS)


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
