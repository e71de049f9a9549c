"""A Sentence-Transformers folder through the whole line, from `ingest --model` to a search.

Its settings become the collection's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.compatibility import stored_settings
from cairn.pipeline.model.folders.model_defaults import encoder_config
from safetensors.numpy import load_file, save_file

from tests.small_ingests import settings, write_texts

TEXTS = {
    "a": "the cat sat on the mat.",
    "b": "old stone path over the mountain.",
    "c": "a river walks to the sea.",
}


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Return the tiny BERT as such a folder, pooled at [CLS] behind a prompt for queries."""
    folder = tmp_path / "model"
    load_encoder(tiny_model_folder, pooling="cls", query_prefix="old mark: ").save(folder)
    (folder / "cairn_config.json").unlink()
    return folder


@pytest.fixture
def corpus(own_folder: Path) -> Path:
    path = own_folder / "corpus.parquet"
    pq.write_table(pa.table({"id": list(TEXTS), "text": list(TEXTS.values())}), path)
    return path


def _ingest(corpus: Path, *options: str) -> int:
    return run(cairn, ["ingest", str(corpus), "--collection", "c", "--quiet", *options], "cairn")


def test_ingest_of_a_folder_stores_what_it_brings_and_searches_with_it(folder: Path, corpus: Path) -> None:
    assert _ingest(corpus, "--model", str(folder), "--precision", "fp32") == 0
    assert (_encoder()["pooling"], _encoder()["query_prefix"]) == ("cls", "old mark: ")
    answer = open_collection("c").search("old stone path over the mountain.", hybrid=False)
    encoder = load_encoder(folder, precision="fp32")
    query = encoder.encode_queries(["old stone path over the mountain."])[0]
    cosines = dict(zip(TEXTS, encoder.encode_documents(list(TEXTS.values())) @ query, strict=True))
    assert [hit.doc_id for hit in answer.hits] == sorted(cosines, key=lambda doc_id: -cosines[doc_id])
    assert np.ptp(list(cosines.values())) > 1e-3


def test_an_ingest_with_cairn_lmk_pools_landmarks_near_the_means_of_its_base(corpus: Path) -> None:
    text = "\n\n".join(
        f"{name}, as the stone masons of the valley knew it, was a long day's work: {fact}. " * 3
        for name, fact in (
            ("A cellar", "water had to be led away before a wall could stand"),
            ("A chimney", "the draught depends on its height and on the wind over the ridge"),
            ("A bridge", "its arch carries nothing until the last wedge is driven in"),
        )
    )
    table = pa.table({"id": ["d"], "title": ["How masons built"], "text": [text]})
    pq.write_table(table, corpus)
    assert _ingest(corpus, "--model", "cairn-lmk") == 0
    named = ("pooling", "attention", "window_tokens", "title_tokens")
    assert [_encoder()[name] for name in named] == ["lmk", "full", 512, 32]
    assert open_collection("c").search("why does an arch stand?").hits[0].doc_id == "d"

    as_shipped = encoder_config({"model": "cairn-lmk"})
    chosen = (
        as_shipped,
        replace(as_shipped, model="all-MiniLM-L6-v2"),
        encoder_config({"model": "all-MiniLM-L6-v2", "whole_text_tokens": 0}),
    )
    trained, untrained, means = (
        DocumentEncoder(each).encode([text], titles=["How masons built"]).chunk_vectors_MV for each in chosen
    )
    assert len(trained) == len(means) >= 3
    assert np.einsum("mv,mv->m", trained, means).mean() > 0.85
    assert np.einsum("mv,mv->m", untrained, means).mean() < 0.7


def test_ingest_again_keeps_the_collections_settings_whatever_the_folder_says_now(
    folder: Path, corpus: Path
) -> None:
    assert _ingest(corpus, "--model", str(folder)) == 0
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    pq.write_table(pa.table({"id": ["d"], "text": ["marks on stones."]}), corpus)
    assert _ingest(corpus) == 0
    assert _encoder()["pooling"] == "cls"
    assert len(open_collection("c").search("stones", hybrid=False).hits) == 4


def _encoder() -> dict[str, Any]:
    """Return the settings of the encoder that the collection has stored."""
    stored = stored_settings("cairn-data", "c")
    assert stored is not None
    return stored["encoder"]


def _scale_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] *= np.float32(1.01)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_ingest_with_the_moved_model_points_the_collection_there_though_nothing_changed(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ingest(corpus, "--model", str(folder)) == 0
    folder.rename(tmp_path / "moved")
    assert run(cairn, ["search", "the cat", "--collection", "c"], "cairn") == 2
    assert "where the model was moved, ingest again with `--model FOLDER`" in capsys.readouterr().err
    assert _ingest(corpus, "--model", str(tmp_path / "moved"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["unchanged"], report["encoded"], report["generation"]) == (3, 0, 2)
    assert _encoder()["model"] == str(tmp_path / "moved")
    assert len(open_collection("c").search("the cat", hybrid=False).hits) == 3
    assert _ingest(corpus, "--json") == 0
    assert json.loads(capsys.readouterr().out)["generation"] == 2


def test_another_model_or_weights_changed_in_place_are_refused_and_both_are_named(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ingest(corpus, "--model", str(folder)) == 0
    shutil.copytree(folder, other := tmp_path / "other")
    _scale_weights(other)
    os.utime(folder / "config.json", (time.time() + 60,) * 2)
    assert _ingest(corpus) == 0
    _scale_weights(folder)
    os.utime(folder / "model.safetensors", (time.time() + 60,) * 2)
    capsys.readouterr()
    for model, options in ((other, ()), (other, ("--dry-run",)), (folder, ())):
        assert _ingest(corpus, "--model", str(model), *options) == 2
        told = capsys.readouterr().err
        assert f"must keep the model it was built with ('{folder}'), got other weights" in told
        assert f"from '{model}'" in told
        assert told.count("\n") == 1
    assert _encoder()["model"] == str(folder)


def test_name_in_the_cache_is_read_and_its_revision_named_once_another_is_there(
    folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository = tmp_path / "hub" / "models--stone--small"
    older, newer = (repository / "snapshots" / (name * 20) for name in ("0a", "1b"))
    shutil.copytree(folder, older)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(older.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert _ingest(corpus, "--model", "stone/small") == 0
    assert (_encoder()["model"], _encoder()["pooling"]) == ("stone/small", "cls")
    assert open_collection("c").search("the cat", hybrid=False).hits
    shutil.copytree(folder, newer)
    _scale_weights(newer)
    (repository / "refs" / "main").write_text(newer.name)
    assert run(cairn, ["search", "the cat", "--collection", "c"], "cairn") == 2
    error = capsys.readouterr().err
    assert f"its model is 'stone/small', revision {newer.name}" in error
    assert error.count("\n") == 1
    assert _ingest(corpus, "--model", str(older)) == 0
    assert run(cairn, ["search", "the cat", "--collection", "c"], "cairn") == 0


def test_ingest_of_a_folder_without_a_module_names_its_place(
    folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "1_Pooling")
    assert _ingest(corpus, "--model", str(folder)) == 1
    assert (
        f"the model's folder {folder / '1_Pooling'} must hold config.json, got none"
        in capsys.readouterr().err
    )


def test_collection_built_on_openvino_goes_on_with_torch_and_is_searched_without_it(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["stone path hill.", "river marks.", "snow wind trail map.", "lake."]
    config = settings(tiny_model_folder, context_documents=2)
    compiled = replace(config, encoder=replace(config.encoder, backend="openvino", precision="int8"))
    build_index([write_texts(tmp_path / "corpus.parquet", texts[:3])], tmp_path, "c", compiled)
    source = write_texts(tmp_path / "corpus.parquet", texts)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ConfigError, match="must have the package openvino"):
        build_index([source], tmp_path, "c", compiled)
    assert build_index([source], tmp_path, "c", config).encoded == 1
    assert open_collection("c", root=tmp_path).search(texts[1], hybrid=False).hits[0].doc_id == "d1"
