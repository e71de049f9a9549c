"""A writer of one collection: what it flushes, and whose settings it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from cairn.pipeline import durable
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.shards import as_parquet
from cairn.pipeline.errors import DiskFullError, StorageError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line import live, waiting_writes, write_log
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.line.live_engine import LiveEngine
from cairn.pipeline.line.waiting_writes import KeptKeys
from cairn.pipeline.line.write_log import WriteLog
from cairn.pipeline.model.document_encoder import run_in_batches
from cairn.pipeline.serve.writers import ServedDocuments

from tests.damages import flip
from tests.served_stones import wait_until


def opened(layout: CollectionLayout) -> LiveWriter:
    return LiveWriter(layout, backbone=lambda: None, take_up=lambda _: None)


def test_folder_of_a_new_collection_outlives_a_power_cut_and_a_stopped_writer_lets_go_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(durable, "fsync_folder", flushed.append)
    layout = CollectionLayout(tmp_path, "c")
    for _ in range(2):
        writer = opened(layout)
        assert writer.is_open
        writer.stop(0)
        assert not writer.is_open
    assert {layout.root, layout.folder} <= {*flushed}


def test_stored_settings_count_once_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CollectionLayout(tmp_path, "c")
    writer = opened(layout)
    writer.create({"cluster": {"num_clusters": 1}}, {})
    assert writer._config().cluster.num_clusters == 1
    monkeypatch.setattr(live, "stored_settings", lambda *_: {"cluster": {"num_clusters": 7}})
    layout.current_path.write_text("another")
    assert writer._config().cluster.num_clusters == 7
    writer.stop(0)


def test_writer_rests_twice_as_long_as_a_publication_took_while_searches_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested, waiting = [0.0], [False]
    writer = LiveWriter(
        CollectionLayout(tmp_path, "c"),
        backbone=lambda: None,
        take_up=lambda _: None,
        is_busy=lambda: waiting[0],
    )
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: sum(rested), sleep=rested.append))
    for is_busy, took, at_least, less_than in (
        (False, 60.0, 0.0, 0.6),
        (True, 0.3, 0.6, 1.0),
        (True, 60.0, live.LONGEST_REST_SECONDS, live.LONGEST_REST_SECONDS + 1.0),
    ):
        began, waiting[0] = sum(rested), is_busy
        writer._rest(took)
        assert at_least <= sum(rested) - began < less_than
    writer.stop(0)
    began = sum(rested)
    writer._rest(60.0)
    assert sum(rested) - began < live.LONGEST_REST_SECONDS


@pytest.mark.parametrize(("size", "is_busy", "threads"), [(9, False, 1), (9_000, False, 2), (9_000, True, 1)])
def test_long_texts_are_encoded_on_one_thread_while_searches_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_threads: Callable[[int], None],
    size: int,
    is_busy: bool,
    threads: int,
) -> None:
    found = list[int]()
    monkeypatch.setattr(EncoderWorker, "encode_shard", lambda *_: found.append(torch.get_num_threads()))
    engine = LiveEngine(IngestConfig(), CollectionLayout(tmp_path, "c"), None, lambda: is_busy)
    rows = {"doc_id": ["a"], "title": pa.array([None], pa.string()), "text": ["x" * size]}
    torch_threads(2)
    engine.encode_shard(as_parquet(pa.table(rows)).to_pybytes())
    assert found == [threads]


def test_stopping_writer_whose_publication_fails_waits_between_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = list[float]()

    def fail(*_: object) -> int:
        attempts.append(time.monotonic())
        raise StorageError("the disk is away")

    monkeypatch.setattr(LiveWriter, "_build", fail)
    writer = opened(CollectionLayout(tmp_path, "c"))
    writer.write([{"doc_id": "a", "title": None, "text": "a stone", "metadata": {}}], ServedDocuments(None))
    wait_until(lambda: attempts)
    writer.stop(3.0)
    assert not writer.is_open
    assert 2 <= len(attempts) <= 4, "one more at once, and one every two seconds"


def test_writer_gives_up_a_first_context_between_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_drawing, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        is_drawing.set()
        while not goes_on.wait(0.01):
            list(run_in_batches(np.ones(1, np.int64), 8, lambda batch: batch, torch.device("cpu")))

    monkeypatch.setattr(EncoderWorker, "draw_context", slow)
    writer = opened(CollectionLayout(tmp_path, "c"))
    writer.create({"cluster": {"num_clusters": 1}}, {})
    document = {"doc_id": "a", "title": None, "text": "an agate", "metadata": {}}
    writer.write([document], ServedDocuments(None))
    try:
        assert is_drawing.wait(60)
        assert writer.stop(0, 10)
    finally:
        goes_on.set()


def test_changed_text_has_the_vector_that_it_has_alone(tmp_path: Path, tiny_model_folder: Path) -> None:
    vectors: list[list[float]] = []
    for name, texts in (("changed", ("an agate", "a river")), ("alone", ("a river",))):
        writer = opened(CollectionLayout(tmp_path, name))
        settings = {"encoder": {"model": str(tiny_model_folder)}, "cluster": {"num_clusters": 1}}
        writer.create(settings, {})
        for text in texts:
            document = {"doc_id": "a", "title": None, "text": text, "metadata": {}}
            assert writer.write([document], ServedDocuments(None)).published.result(300).fault is None
        writer.stop(1)
        documents = open_collection(name, root=tmp_path).documents
        vectors += documents.to_arrow(["vector"]).column("vector").to_pylist()
    np.testing.assert_allclose(*vectors, atol=1e-5)


def records(path: Path) -> list[int]:
    log = WriteLog(path)
    log.close()
    return [record["number"] for _, record in log.records]


def test_log_cut_at_any_byte_or_filled_with_zeros_has_all_whole_records_before_it(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    ends = [log.append({"number": number, "text": "é\u2028"}) for number in range(4)][1:]
    log.close()
    content = (tmp_path / "writes.log").read_bytes()
    for size in range(len(content)):
        path = tmp_path / f"{size}.log"
        path.write_bytes(content[:size])
        assert records(path) == list(range(sum(end <= size for end in ends)))
        assert records(path) == list(range(sum(end <= size for end in ends))), "it was cut there"
    (tmp_path / "writes.log").write_bytes(content + bytes(4_096))
    assert records(tmp_path / "writes.log") == [0, 1, 2, 3]


def test_flipped_bit_costs_no_record_before_it(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    starts = [log.append({"number": number}) for number in range(3)]
    log.close()
    flip(tmp_path / "writes.log", starts[2] + 9)
    content = (tmp_path / "writes.log").read_bytes()
    assert records(tmp_path / "writes.log") == [0, 1]
    assert (tmp_path / "writes.log.cut").read_bytes() == content[starts[2] :]


def test_append_that_fails_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = WriteLog(tmp_path / "writes.log")
    log.append({"number": 0})

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cairn.pipeline.line.write_log.os.fsync", refuse)
        with pytest.raises(DiskFullError):
            log.append({"number": 1})
    before = (tmp_path / "writes.log").stat().st_ino
    log.append({"number": 2})
    log.append({"number": 3})
    log.close()
    assert records(tmp_path / "writes.log") == [0, 2, 3]
    assert (tmp_path / "writes.log").stat().st_ino != before, "what was not flushed is written again"


def test_replaced_log_keeps_what_follows_a_position(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    positions = [log.append({"number": number}) for number in range(4)]
    log.replace({"number": 10}, positions[2])
    log.replace({"number": 20}, positions[3])
    log.append({"number": 4})
    log.close()
    assert records(tmp_path / "writes.log") == [20, 3, 4]


@pytest.mark.parametrize("step", ["fsync_file", "fsync_folder"])
def test_log_that_could_not_be_replaced_takes_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    log = WriteLog(tmp_path / "writes.log")
    positions = [log.append({"number": number}) for number in range(3)]

    def refuse(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"cairn.pipeline.durable.{step}", refuse)
        with pytest.raises(StorageError):
            log.replace({"number": 10}, positions[2])
    log.append({"number": 3})
    log.replace({"number": 20}, positions[2])
    log.append({"number": 4})
    log.close()
    assert records(tmp_path / "writes.log") == [20, 2, 3, 4]


def test_log_is_grown_once_it_is_twice_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_log, "GROWN_BYTES", 100)
    log = WriteLog(tmp_path / "writes.log")
    log.append({"text": "x" * 200})
    assert log.is_grown
    log.replace({"text": "x" * 200}, None)
    assert not log.is_grown
    log.append({"text": "x" * 200})
    log.append({})
    assert log.is_grown
    log.close()


@pytest.mark.parametrize(
    ("num_keys", "num_documents", "kept"),
    [(2, 100, "de"), (100, 5, "de"), (100, 1, "e"), (100, 100, "abcde")],
)
def test_oldest_keys_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch, num_keys: int, num_documents: int, kept: str
) -> None:
    monkeypatch.setattr(waiting_writes, "KEPT_KEYS", num_keys)
    monkeypatch.setattr(waiting_writes, "KEPT_DOCUMENTS", num_documents)
    keys = KeptKeys()
    for number, key in enumerate("abcde"):
        keys.add({key: ("digest", number, {"documents": [{}], "missing": ["x"]})})
    assert list(keys.answers) == list(kept)
