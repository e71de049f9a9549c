"""A manifest of another format is refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.manifest import FORMAT_VERSION, MANIFEST_NAME, TOKENIZER_VERSION, Manifest


def test_manifest_of_another_release_is_refused_but_for_a_setting_that_is_gone(tmp_path: Path) -> None:
    def read(**changes: Any) -> Manifest:
        content: dict[str, Any] = {item.name: {} for item in fields(Manifest)}
        content |= {"format_version": FORMAT_VERSION, "tokenizer_version": TOKENIZER_VERSION, **changes}
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(content), encoding="utf-8")
        return Manifest.read(tmp_path)

    for version in (0, 1, 8, None, "9"):
        with pytest.raises(IntegrityError, match="must have format_version 9; it was written by another rel"):
            read(format_version=version)
    with pytest.raises(IntegrityError, match="tokenizer_version 3, got 1: another release counted its words"):
        read(tokenizer_version=1)
    gone = {"encoder": {"pooling": "cls", "whitening": 0.0}}
    assert read(settings=gone).encoder == EncoderConfig(pooling="cls")
