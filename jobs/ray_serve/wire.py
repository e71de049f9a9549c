"""Messages between a server and its shards as bytes: JSON, and the arrays behind it as they lie in memory.

    size of the JSON | JSON | array | array …      each begins at a multiple of 64

Reading a message of any sender makes arrays of numbers, tables of Arrow, plain values, the classes of
:data:`MESSAGES` and Cairn's errors, and runs nothing else.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from cairn.pipeline import errors
from cairn.pipeline.errors import CairnError
from cairn.pipeline.lexical.bm25 import Totals
from cairn.pipeline.search.fusion import LateQuery, Windows
from cairn.pipeline.search.reader import MatchesAsked, PassagesAsked, PassagesRead, TokenMatches, WindowScores
from cairn.pipeline.search.shards import parts

MESSAGES: Final[Mapping[str, type]] = {
    each.__name__: each
    for each in (
        Totals,
        LateQuery,
        Windows,
        MatchesAsked,
        PassagesAsked,
        PassagesRead,
        TokenMatches,
        WindowScores,
        *(
            found
            for _, found in inspect.getmembers(parts, inspect.isclass)
            if found.__module__ == parts.__name__ and (is_dataclass(found) or issubclass(found, tuple))
        ),
    )
}
"""What a message may be made of, by name."""
_FIELDS: Final = {name: tuple(inspect.signature(found).parameters) for name, found in MESSAGES.items()}
_ERRORS: Final = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, CairnError)
}
_NUMBERS: Final = "biuf"
"""Kinds of dtype: an array of objects would be a pickle."""
_ALIGNMENT: Final = 64
_SIZE: Final = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """Return a message as bytes; raises a TypeError where it holds what no message may."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_plain(message, arrays), separators=(",", ":")).encode()
    parts = [_SIZE.pack(len(text)), text]
    end = _SIZE.size + len(text)
    for array in arrays:
        parts += [bytes(-end % _ALIGNMENT), array.tobytes()]
        end += len(parts[-2]) + len(parts[-1])
    return b"".join(parts)


def unpack(payload: bytes | bytearray) -> Any:
    """Return the message that :func:`pack` made; its arrays may be written to, and lie in a bytearray given.

    Raises a ValueError, or a KeyError of a class that no message is made of.
    """
    if isinstance(payload, bytes):
        payload = bytearray(payload)
    (size,) = _SIZE.unpack_from(payload)
    begin = _SIZE.size + size
    return _Reader(payload, begin).made(json.loads(payload[_SIZE.size : begin]))


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value as JSON has it: a list begins with the name of what it stands for."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, pa.Table):
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, value.schema) as writer:
                writer.write_table(value)
            return ["table", _plain(np.frombuffer(sink.getvalue(), np.uint8), arrays)]
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        arrays.append(value)
        return ["array", value.dtype.str, *value.shape]
    if isinstance(value, np.number):
        return value.item()
    if isinstance(value, CairnError):
        state = {name: each for name, each in vars(value).items() if each is None or isinstance(each, str)}
        return ["error", type(value).__name__, str(value.args[0]) if value.args else "", state]
    if isinstance(value, Mapping):
        return ["mapping", *([_plain(key, arrays), _plain(each, arrays)] for key, each in value.items())]
    name = type(value).__name__
    if MESSAGES.get(name) is type(value):
        return ["message", name, *(_plain(getattr(value, each), arrays) for each in _FIELDS[name])]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_plain(each, arrays) for each in value)]
    raise TypeError(f"a message must hold numbers, texts, arrays and {', '.join(MESSAGES)}, got a {name}")


class _Reader:
    """Takes the arrays of a message in their order."""

    def __init__(self, payload: bytearray, begin: int) -> None:
        self._payload, self._end = payload, begin

    def made(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *parts = plain
        if kind == "array":
            return self._array(np.dtype(parts[0]), parts[1:])
        if kind == "table":
            return pa.ipc.open_stream(pa.py_buffer(self.made(parts[0]))).read_all()
        if kind == "mapping":
            return {self.made(key): self.made(each) for key, each in parts}
        if kind == "error":
            error = _ERRORS[parts[0]](parts[1])
            vars(error).update(parts[2])
            return error
        if kind == "message":
            message = MESSAGES[parts[0]]
            return message(**dict(zip(_FIELDS[parts[0]], map(self.made, parts[1:]), strict=True)))
        values = [self.made(each) for each in parts]
        return values if kind == "list" else tuple(values)

    def _array(self, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of a message must hold numbers, got {dtype}")
        begin, count = self._end + -self._end % _ALIGNMENT, math.prod(shape)
        self._end = begin + count * dtype.itemsize
        return np.frombuffer(self._payload, dtype, count, begin).reshape(shape)
