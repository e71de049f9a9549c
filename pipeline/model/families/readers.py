"""Which function reads a model type, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.folders.model_types import model_type_named


def reader_of(model_type: object) -> Callable[..., Transformer]:
    """Return the reader of a family: of a checkpoint, with ``dtype`` and ``device``.

    Readers of types that can be causal take ``is_causal`` as well. An unknown type raises
    :class:`ModelError`.
    """
    return resolve_name(model_type_named(model_type).reader)
