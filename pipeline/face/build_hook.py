"""Puts the package `cairn` at the top of a wheel; an editable install reads it here instead."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from typing_extensions import override


class FaceHook(BuildHookInterface):
    """Hatchling's ``sources`` cannot: the folder lies in one that is mapped to another place."""

    @override
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Include the package in what is not an editable build."""
        if version != "editable":
            build_data["force_include"]["pipeline/face/cairn"] = "cairn"
