"""Puts the package `cairn` at the top of a wheel; an editable install reads it here instead.

Hatchling's ``sources`` cannot: the folder lies in one that goes to another place. A build has Hatchling
alone, so nothing else is imported.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FaceHook(BuildHookInterface):
    """Includes the package in what is not an editable build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # pyright: ignore[reportImplicitOverride]
        """Add it to the files of the build."""
        if version != "editable":
            build_data["force_include"]["pipeline/face/cairn"] = "cairn"
