import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.errors import (
    FingerprintMismatchError,
    UsageError,
)
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.types import IngestReport

from tests.damages import cut, put
from tests.small_ingests import document, stopped_at, write_rows
from tests.stored_collections import require_same, stored


def ids(count: int) -> list[str]:
    return [f"doc-{number:03d}" for number in range(count)]


Ingest = Callable[..., IngestReport]


@pytest.fixture
def ingest(root: Path, tmp_path: Path, config: IngestConfig) -> Ingest:
    """Return what ingests rows, or the first documents, from one file, with other settings where given."""

    def run(rows: int | list[dict[str, Any]], name: str = "c", **changes: Any) -> IngestReport:
        given = [document(number) for number in range(rows)] if isinstance(rows, int) else rows
        source = write_rows(tmp_path / "a.parquet", given)
        return build_index([source], root, name, replace(config, **changes))

    return run


def test_ingest_of_a_new_corpus_stores_every_document_with_spans_that_cover_it(
    root: Path, ingest: Ingest
) -> None:
    rows = [document(number) for number in range(30)]
    report = ingest(rows)
    assert report.stage_seconds["setup"] > 0.0
    assert sum(report.stage_seconds.values()) == pytest.approx(report.seconds)
    assert (report.rows, report.indexed, report.unchanged, report.quarantined) == (30, 30, 0, 0)
    assert (report.encoded, report.generation) == (30, 1)
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


def test_ingest_of_changes_replaces_and_adds_only_these(root: Path, ingest: Ingest) -> None:
    ingest(20)
    changed = [document(number, version=int(number in (3, 7))) for number in range(22)]
    report = ingest(changed)
    assert (report.indexed, report.unchanged, report.encoded, report.generation) == (4, 18, 4, 2)
    ingest(changed, "fresh")
    texts = {doc_id: row["text"] for doc_id, row in stored(root).items()}
    assert texts == {row["id"]: row["text"] for row in changed}
    require_same(stored(root), stored(root, "fresh"))


@pytest.mark.parametrize(
    ("table", "damage"), [("documents", "cut"), ("chunks", "file"), ("documents", "FIFO")]
)
def test_ingest_mends_a_damaged_version_manifest_and_goes_on(
    root: Path, ingest: Ingest, table: str, damage: str
) -> None:
    ingest(4)
    versions = CollectionLayout(root, "c").lance_folder / f"{table}.lance" / "_versions"
    newest = min(versions.glob("*.manifest"))
    if damage == "cut":
        cut(newest)
    else:
        put(newest, damage)
    assert ingest(5).generation == 2
    assert sorted(stored(root)) == ids(5)
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_sync_deletes_what_vanished_and_nothing_goes_without_it(
    root: Path, tmp_path: Path, config: IngestConfig, ingest: Ingest
) -> None:
    ingest(10)
    assert ingest(6).deleted == 0
    assert len(stored(root)) == 10
    with pytest.raises(UsageError, match=r"at most 20% of the documents, got 4 of 10 .* --max-deleted 0\.4"):
        ingest(6, sync=True)
    plan = plan_index([str(tmp_path / "a.parquet")], root, "c", replace(config, sync=True))
    assert "--max-deleted 0.4" in plan["warnings"][0]
    assert ingest(6, sync=True, max_deleted=0.4).deleted == 4
    assert sorted(stored(root)) == ids(6)


def test_sync_with_a_damaged_file_deletes_nothing_and_warns(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_rows(folder / "a.parquet", [document(number) for number in range(5)])
    write_rows(folder / "b.parquet", [document(number) for number in range(5, 10)])
    build_index([str(folder)], root, "c", config)
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-20])
    report = build_index([str(folder)], root, "c", replace(config, sync=True))
    assert (report.deleted, report.quarantined) == (0, 1)
    assert any("--sync deleted nothing" in warning for warning in report.warnings)
    assert len(stored(root)) == 10


def test_sync_with_a_csv_cut_in_a_text_deletes_nothing_until_it_ends_with_a_line_end(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    source = tmp_path / "a.csv"
    lines = ["id,title,text"] + [f"{number},stone,an old stone path {number}" for number in range(10)]
    source.write_text("\n".join([*lines, ""]))
    build_index([str(source)], root, "c", config)
    source.write_text("\n".join(lines[:-1])[:-4])
    for _ in range(2):
        report = build_index([str(source)], root, "c", replace(config, sync=True))
        assert report.deleted == 0
        told = "its last row, in line 10, has no line end behind it and may be cut"
        assert any(told in warning for warning in report.warnings)
        assert "--sync deleted nothing" in report.warnings[-1]
    source.write_text("\n".join([*lines[:-1], ""]))
    assert build_index([str(source)], root, "c", replace(config, sync=True)).deleted == 1


def test_context_is_embedded_once_for_an_encoder_that_reads_it_and_moves_its_vectors(
    root: Path, config: IngestConfig, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(12, "contextual", encoder=replace(config.encoder, use_context=True))
    monkeypatch.setattr(ContextEncoder, "embed", lambda self, texts: pytest.fail("embedded"))
    ingest(12, "plain")
    drawn, read = (
        ContextSet.read(open_generation(CollectionLayout(root, name)).folder / "context.arrow")
        for name in ("plain", "contextual")
    )
    assert set(drawn.doc_ids) <= set(ids(12))
    assert len(drawn.doc_ids) > 0
    plain, contextual = (stored(root, name)["doc-003"]["vector"] for name in ("plain", "contextual"))
    assert np.abs(np.subtract(plain, contextual)).max() > 1e-4
    more = [document(number) for number in range(12, 20)]
    ingest(more, "contextual", encoder=replace(config.encoder, use_context=True))
    manifest = open_generation(CollectionLayout(root, "contextual")).manifest
    assert (manifest.generation, manifest.fingerprints["context"]) == (2, read.fingerprint)
    hits = open_collection("contextual", root=root).search(document(3)["text"], hybrid=False).hits
    assert hits[0].doc_id == "doc-003"


def test_interrupted_ingest_goes_on_without_encoding_finished_shards_again(
    root: Path, ingest: Ingest
) -> None:
    with stopped_at("shard-written", times=3):
        ingest(30)
    report = ingest(30)
    assert report.indexed == 30
    assert 0 < report.encoded < 30
    ingest(30, "fresh")
    require_same(stored(root), stored(root, "fresh"))


def test_interrupted_ingest_begins_again_where_another_writer_has_published_meanwhile(
    root: Path, ingest: Ingest
) -> None:
    ingest(10)
    with stopped_at("shard-written", times=3):
        ingest(30)
    delete_documents(CollectionLayout(root, "c"), ["doc-003"])
    assert ingest(30).encoded == 21


def test_document_changed_between_two_interrupted_runs_is_stored_once_with_its_last_text(
    root: Path, ingest: Ingest
) -> None:
    for version, shards in ((0, 4), (1, 2), (0, 1)):
        with stopped_at("shard-written", times=shards):
            ingest([document(number, version=version * int(number < 5)) for number in range(30)])
    report = ingest(30)
    assert (report.rows, report.indexed) == (30, 30)
    ingest(30, "fresh")
    require_same(stored(root), stored(root, "fresh"))


def test_ingest_with_another_setting_is_refused_before_any_work(
    config: IngestConfig, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(5)
    monkeypatch.setattr(EncoderWorker, "begin", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(FingerprintMismatchError, match=r"encoder\.temperature is 1\.0, got 0\.9"):
        ingest(5, encoder=replace(config.encoder, temperature=0.9))
    with pytest.raises(FingerprintMismatchError, match=r"index\.partitions is 1, got 2"):
        ingest(5, index=replace(config.index, partitions=2))


def test_ingest_without_changes_loads_no_model(root: Path, tmp_path: Path, ingest: Ingest) -> None:
    ingest(5)
    program = (
        "import sys; from cairn.cli.main import cairn, run; code = run(cairn, ['ingest', "
        f"{str(tmp_path / 'a.parquet')!r}, "
        f"'--collection', 'c', '--root', {str(root)!r}, '--quiet'], 'cairn'); print(code, 'torch' in "
        "sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False"
