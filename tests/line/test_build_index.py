import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline import durable
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import (
    CollectionBusyError,
    ConfigError,
    FingerprintMismatchError,
    SchemaError,
    SourceError,
)
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.model.context_encoder import ContextEncoder

WORDS = (
    *("stone", "path", "hill", "river", "marks", "way", "cairn", "summit", "ridge", "valley"),
    *("snow", "wind", "trail", "map", "light", "north", "south", "rock", "lake", "pine"),
)


def document(number: int, version: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([number, version])
    text = " ".join(rng.choice(WORDS, size=10 + 15 * (number % 5)))
    return {
        "id": f"doc-{number:03d}",
        "title": f"{WORDS[number % len(WORDS)]} {number}",
        "text": f"{text}.",
        "year": 2000 + number % 7,
    }


def write_corpus(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(
        pa.Table.from_pylist(
            rows, pa.schema([("id", "string"), ("title", "string"), ("text", "string"), ("year", "int64")])
        ),
        path,
    )
    return str(path)


def disarm() -> None:
    durable._observers.clear()  # pyright: ignore[reportPrivateUsage]


def test_ingest_of_a_new_corpus_stores_every_document_with_spans_that_cover_it(
    root: Path, tmp_path: Path, config: IngestConfig, stored: Callable[..., Any]
) -> None:
    rows = [document(number) for number in range(30)]
    report = build_index([write_corpus(tmp_path / "a.parquet", rows)], root, "c", config)
    assert (
        report.rows,
        report.indexed,
        report.unchanged,
        report.quarantined,
        report.encoded,
        report.generation,
    ) == (30, 30, 0, 0, 30, 1)
    documents = stored(root)
    assert sorted(documents) == [row["id"] for row in rows]
    for row in rows:
        chunks = documents[row["id"]]["chunks"]
        assert (
            "".join(row["text"][chunk["start_char"] : chunk["end_char"]] for chunk in chunks) == row["text"]
        )
        mean = np.mean([chunk["vector"] for chunk in chunks], axis=0)
        assert np.allclose(documents[row["id"]]["vector"], mean / np.linalg.norm(mean), atol=1e-6)
        assert documents[row["id"]]["year"] == row["year"]


def test_ingest_of_the_same_corpus_twice_encodes_nothing_and_keeps_the_generation(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(12)])
    build_index([source], root, "c", config)
    report = build_index([source], root, "c", config)
    assert (report.rows, report.indexed, report.unchanged, report.encoded, report.generation) == (
        12,
        0,
        12,
        0,
        1,
    )


def test_ingest_of_changes_replaces_and_adds_only_these(
    root: Path,
    tmp_path: Path,
    config: IngestConfig,
    stored: Callable[..., Any],
    require_same: Callable[..., None],
) -> None:
    build_index(
        [write_corpus(tmp_path / "a.parquet", [document(number) for number in range(20)])], root, "c", config
    )
    changed = [document(number, version=int(number in (3, 7))) for number in range(22)]
    report = build_index([write_corpus(tmp_path / "a.parquet", changed)], root, "c", config)
    assert (report.indexed, report.unchanged, report.encoded, report.generation) == (4, 18, 4, 2)
    build_index([write_corpus(tmp_path / "b.parquet", changed)], root, "fresh", config)
    texts = {doc_id: row["text"] for doc_id, row in stored(root).items()}
    assert texts == {row["id"]: row["text"] for row in changed}
    require_same(stored(root), stored(root, "fresh"))


def test_sync_deletes_what_vanished_and_nothing_goes_without_it(
    root: Path, tmp_path: Path, config: IngestConfig, stored: Callable[..., Any]
) -> None:
    build_index(
        [write_corpus(tmp_path / "a.parquet", [document(number) for number in range(10)])], root, "c", config
    )
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(6)])
    assert build_index([source], root, "c", config).deleted == 0
    assert len(stored(root)) == 10
    assert build_index([source], root, "c", replace(config, sync=True)).deleted == 4
    assert sorted(stored(root)) == [f"doc-{number:03d}" for number in range(6)]


def test_sync_with_a_damaged_file_deletes_nothing_and_warns(
    root: Path, tmp_path: Path, config: IngestConfig, stored: Callable[..., Any]
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder / "a.parquet", [document(number) for number in range(5)])
    write_corpus(folder / "b.parquet", [document(number) for number in range(5, 10)])
    build_index([str(folder)], root, "c", config)
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-20])
    report = build_index([str(folder)], root, "c", replace(config, sync=True))
    assert (report.deleted, report.quarantined) == (0, 1)
    assert any("--sync deleted nothing" in warning for warning in report.warnings)
    assert len(stored(root)) == 10


def test_second_ingest_does_not_embed_the_context_again(
    root: Path, tmp_path: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(
        [write_corpus(tmp_path / "a.parquet", [document(number) for number in range(12)])], root, "c", config
    )
    before = open_generation(CollectionLayout(root, "c")).manifest.fingerprints["context"]
    embedded: list[int] = []
    monkeypatch.setattr(ContextEncoder, "embed", lambda self, texts: embedded.append(len(texts)))
    build_index(
        [write_corpus(tmp_path / "b.parquet", [document(number) for number in range(12, 20)])],
        root,
        "c",
        config,
    )
    assert embedded == []
    assert open_generation(CollectionLayout(root, "c")).manifest.fingerprints["context"] == before


def test_interrupted_ingest_goes_on_without_encoding_finished_shards_again(
    root: Path,
    tmp_path: Path,
    config: IngestConfig,
    stop_at: Any,
    stored: Callable[..., Any],
    require_same: Callable[..., None],
) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(30)])
    stop_at("shard-written", times=3)
    with pytest.raises(KeyboardInterrupt):
        build_index([source], root, "c", config)
    disarm()
    report = build_index([source], root, "c", config)
    assert report.indexed == 30
    assert 0 < report.encoded < 30
    build_index([source], root, "fresh", config)
    require_same(stored(root), stored(root, "fresh"))


def test_document_changed_between_two_interrupted_runs_is_stored_once_with_its_last_text(
    root: Path,
    tmp_path: Path,
    config: IngestConfig,
    stop_at: Any,
    stored: Callable[..., Any],
    require_same: Callable[..., None],
) -> None:
    versions = ((0, 4), (1, 2), (0, 1))
    source = str(tmp_path / "a.parquet")
    for version, shards in versions:
        write_corpus(
            tmp_path / "a.parquet",
            [document(number, version=version * int(number < 5)) for number in range(30)],
        )
        stop_at("shard-written", times=shards)
        with pytest.raises(KeyboardInterrupt):
            build_index([source], root, "c", config)
        disarm()
    report = build_index([source], root, "c", config)
    assert (report.rows, report.indexed) == (30, 30)
    build_index([source], root, "fresh", config)
    require_same(stored(root), stored(root, "fresh"))


def test_quarantined_rows_are_counted_by_reason_and_recorded(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    rows = [document(number) for number in range(6)]
    rows[2]["text"], rows[3]["id"] = "   ", None
    rows.append(document(0))
    report = build_index([write_corpus(tmp_path / "a.parquet", rows)], root, "c", config)
    assert (report.rows, report.indexed, report.quarantined) == (7, 4, 3)
    assert report.quarantine_reasons == {"duplicate_id": 1, "empty_text": 1, "null_id": 1}
    layout = CollectionLayout(root, "c")
    (record,) = layout.runs_folder.iterdir()
    assert json.loads(record.read_text())["report"]["quarantine_reasons"] == report.quarantine_reasons
    (refused,) = layout.quarantine_folder.iterdir()
    assert sorted(pq.read_table(refused).column("reason").to_pylist()) == [
        "duplicate_id",
        "empty_text",
        "null_id",
    ]


def test_corpus_of_empty_texts_is_refused_and_publishes_nothing(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    rows = [{**document(number), "text": " "} for number in range(3)]
    with pytest.raises(SourceError, match="every row was quarantined"):
        build_index([write_corpus(tmp_path / "a.parquet", rows)], root, "c", config)
    assert CollectionLayout(root, "c").current_generation_number() is None


def test_ingest_with_another_setting_is_refused_before_any_work(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])
    build_index([source], root, "c", config)
    other = replace(config, encoder=replace(config.encoder, temperature=0.9))
    with pytest.raises(FingerprintMismatchError, match=r"encoder\.temperature is 1\.0, got 0\.9"):
        build_index([source], root, "c", other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dims": 33}, "between 1 and the model's 32, got 33"),
        ({"layers": 3}, "between 1 and the model's 2, got 3"),
        ({"landmark_interval": 95, "window_tokens": 200}, "choose at most 94"),
        ({"attention": "full", "window_tokens": 97}, "at most the model's 96 positions, got 97"),
        ({"document_prefix": "a " * 90}, "document_prefix must leave a chunk"),
        ({"temperature_by_length": ((400, 0.9),)}, "lengths that rows reach"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_setting_the_model_has_no_room_for_is_refused_before_anything_is_written(
    root: Path, tmp_path: Path, config: IngestConfig, changes: dict[str, Any], sentence: str
) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])
    with pytest.raises(ConfigError, match=sentence):
        build_index([source], root, "c", replace(config, encoder=replace(config.encoder, **changes)))
    assert not root.exists() or list(root.iterdir()) == []


def test_ingest_without_changes_loads_no_model(root: Path, tmp_path: Path, config: IngestConfig) -> None:
    import subprocess
    import sys

    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])
    build_index([source], root, "c", config)
    program = (
        "import sys; from cairn.cli.main import cairn, run; "
        f"code = run(cairn, ['ingest', {source!r}, '--collection', 'c', '--root', {str(root)!r}, "
        "'--quiet'], 'cairn'); "
        "print(code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False"


def test_ingest_with_changed_weights_is_refused_and_keeps_the_published(
    root: Path, tmp_path: Path, config: IngestConfig, tiny_model_folder: Path
) -> None:
    import shutil

    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    config = replace(config, encoder=replace(config.encoder, model=str(folder)))
    build_index(
        [write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])], root, "c", config
    )
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"] * np.float32(
        1.01
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FingerprintMismatchError):
        build_index([write_corpus(tmp_path / "b.parquet", [document(9)])], root, "c", config)
    layout = CollectionLayout(root, "c")
    assert layout.current_generation_number() == 1
    assert not list(layout.encoded_folder.glob("*.parquet"))


def test_ingest_with_other_metadata_columns_is_refused(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    build_index(
        [write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])], root, "c", config
    )
    pq.write_table(pa.table({"id": ["x"], "text": ["stone path"], "colour": ["red"]}), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"colour|year|title"):
        build_index([str(tmp_path / "b.parquet")], root, "c", config)


def test_second_writer_is_told_to_try_again(root: Path, tmp_path: Path, config: IngestConfig) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(5)])
    with CollectionLayout(root, "c").writer_lock(), pytest.raises(CollectionBusyError):
        build_index([source], root, "c", config)


def test_stored_context_reaches_the_encoder_when_asked_for(
    root: Path, tmp_path: Path, config: IngestConfig, stored: Callable[..., Any]
) -> None:
    source = write_corpus(tmp_path / "a.parquet", [document(number) for number in range(12)])
    build_index([source], root, "plain", config)
    build_index(
        [source], root, "contextual", replace(config, encoder=replace(config.encoder, use_context=True))
    )
    plain, contextual = (
        stored(root, "plain")["doc-003"]["vector"],
        stored(root, "contextual")["doc-003"]["vector"],
    )
    assert np.abs(np.subtract(plain, contextual)).max() > 1e-4
    hits = open_collection("contextual", root=root).search(document(3)["text"], hybrid=False).hits
    assert hits[0].doc_id == "doc-003"
