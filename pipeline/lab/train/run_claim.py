"""The folder of a run belongs to one set of settings and data: what a run is made of stands in run.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.pipeline import durable
from cairn.pipeline.errors import FingerprintMismatchError, IntegrityError, ModelError
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json


def claim_folder(
    folder: Path, config: Any, made_of: Mapping[str, str | None], skipped: Mapping[str, int]
) -> None:
    """Write what this run is made of, or compare it with what a run in the folder was made of.

    ``config`` is a dataclass of settings that needs no more than its ``steps``. Another one, and data of
    another kind in ``made_of``, raise :class:`FingerprintMismatchError`.
    """
    settings = _as_json(config)
    path = folder / "run.json"
    if path.is_file():
        stored = _read_claim(path)
        # A setting younger than the run stood at its default.
        before: dict[str, Any] = _as_json(type(config)(steps=config.steps)) | stored.get("settings", {})
        others = [
            f"{name} {before.get(name)}" for name, value in settings.items() if before.get(name) != value
        ]
        others += [f"another {name}" for name, value in made_of.items() if stored.get(name) != value]
        if others:
            raise FingerprintMismatchError(
                "a run must go on with what it was started with, got a folder of a run with "
                f"{', '.join(others)}; "
                "give the same settings and data, or another folder"
            )
        return
    with durable.storage_errors("starting the run"):
        durable.write_json(path, {"settings": settings, **made_of, "skipped": dict(skipped)})


def _read_claim(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ModelError as error:
        raise IntegrityError(
            f"{path.name} of the run must be JSON, got a damaged file; train in another folder"
        ) from error


def _as_json(config: Any) -> dict[str, Any]:
    return {
        name: list(value)
        if isinstance(value, tuple)
        else str(value)
        if value in (math.inf, -math.inf)
        else value
        for name, value in asdict(config).items()
    }
