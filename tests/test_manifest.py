"""A manifest of another format is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.manifest import MANIFEST_NAME, Manifest


@pytest.mark.parametrize("version", [0, 1, 3, 5, None, "4"])
def test_manifest_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"format_version": version}), encoding="utf-8")
    with pytest.raises(IntegrityError, match="must have format_version 4; it was written by another release"):
        Manifest.read(tmp_path)
