"""The name that Cairn is installed and imported by: ``import cairn`` gives the public names of ``pipeline``.

It lies in a folder of its own, which the wheel and an editable install put beside ``pipeline``
(``[tool.hatch.build]`` in pyproject.toml).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pipeline

if TYPE_CHECKING:
    from pipeline import *  # noqa: F403 - its `__all__` names them
else:
    __all__ = getattr(pipeline, "__all__", ())
    if "open_collection" not in __all__:
        raise ImportError(
            f"cairn must find its own package pipeline, got {pipeline.__file__}; rename that one, or start "
            "Python in another folder"
        )

    def __dir__() -> list[str]:
        return [*globals(), *__all__]

    def __getattr__(name: str) -> Any:
        if name in __all__:  # looked up when asked for, so that importing Cairn loads no model library
            return getattr(pipeline, name)
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
