"""A manifest written under the older names of some settings opens as if it had been written today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.line.compatibility import require_same_settings
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.manifest import MANIFEST_NAME, RENAMED_SETTINGS, Manifest

VERSION_1 = (Path(__file__).parent / "golden" / "manifest_version_1.json").read_text(encoding="utf-8")
"""Written by the release before, with the settings that were renamed away from their defaults."""


def read(folder: Path, content: str) -> Manifest:
    (folder / MANIFEST_NAME).write_text(content, encoding="utf-8")
    return Manifest.read(folder)


def test_settings_of_version_1_have_the_names_of_today(tmp_path: Path) -> None:
    stored, settings = json.loads(VERSION_1)["settings"], read(tmp_path, VERSION_1).settings
    for stage, renamed in RENAMED_SETTINGS.items():
        for old, new in renamed.items():
            assert settings[stage][new] == stored[stage][old]
            assert old not in settings[stage]
    config = resolve_ingest_config({}, settings)
    assert (config.encoder.dims, config.encoder.layers, config.encoder.window_tokens) == (128, 4, 256)
    assert (config.context.context_documents, config.index.index_kind) == (8, "flat")


def test_rerun_of_a_collection_of_version_1_has_the_same_settings(tmp_path: Path) -> None:
    manifest = read(tmp_path, VERSION_1)
    require_same_settings(manifest, resolve_ingest_config({}, manifest.settings))


def test_encoder_of_version_1_has_the_same_fingerprint(tmp_path: Path) -> None:
    manifest = read(tmp_path, VERSION_1)
    encoder = DocumentEncoder(resolve_ingest_config({}, manifest.settings).encoder)
    assert encoder.fingerprint == manifest.fingerprints["encoder"]


@pytest.mark.parametrize("version", [0, 5, None, "1"])
def test_manifest_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    with pytest.raises(IntegrityError, match="must have format_version 1, 2, 3, 4"):
        read(tmp_path, json.dumps({**json.loads(VERSION_1), "format_version": version}))
