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


@pytest.mark.parametrize("version", [0, 1, 8, None, "9"])
def test_manifest_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"format_version": version}), encoding="utf-8")
    with pytest.raises(IntegrityError, match="must have format_version 9; it was written by another release"):
        Manifest.read(tmp_path)


def test_manifest_of_words_counted_otherwise_is_refused(tmp_path: Path) -> None:
    content = {"format_version": FORMAT_VERSION, "tokenizer_version": 1}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(IntegrityError, match="tokenizer_version 2, got 1: another release counted its words"):
        Manifest.read(tmp_path)


def test_setting_of_the_encoder_that_this_release_no_longer_has_is_read_past(tmp_path: Path) -> None:
    content: dict[str, Any] = {item.name: {} for item in fields(Manifest)}
    content |= {"format_version": FORMAT_VERSION, "tokenizer_version": TOKENIZER_VERSION}
    content["settings"] = {"encoder": {"pooling": "cls", "whitening": 0.0}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content), encoding="utf-8")
    assert Manifest.read(tmp_path).encoder == EncoderConfig(pooling="cls")
