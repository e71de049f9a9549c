"""Which tensors of a checkpoint a family's reader asks for: those that training makes parameters of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from typing_extensions import override


class RecordedTensors(dict[str, torch.Tensor]):
    """Tensors that note the names of those a reader asks for, in order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.names: list[str] = []

    @override
    def get(self, key: str, default: Any = None, /) -> Any:
        self.names.append(key)
        return super().get(key, default)


def shared_prefix(names: Sequence[str]) -> str:
    """Return the parts that all names begin with; layers and embeddings begin with words of their own."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))
