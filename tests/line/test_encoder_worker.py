"""A worker hands shards over in a folder that it shares with the driver, or as bytes."""

from __future__ import annotations

import errno
import io
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.endpoint import EndpointEncoder
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.embedding_server import EmbeddingServer

TABLE = pa.table({"vector": [1.0, 2.0]})


@pytest.fixture
def worker() -> EncoderWorker:
    return EncoderWorker(IngestConfig())


def test_file_is_left_in_the_folder_that_has_the_drivers_mark(worker: EncoderWorker, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    worker.share(tmp_path, "mark")
    first, second = (worker._handed_over(TABLE) for _ in range(2))
    assert isinstance(first, Path)
    assert first != second
    assert first.parent == tmp_path
    assert pq.read_table(first) == TABLE


def test_folder_of_another_machine_with_the_same_name_is_not_shared(
    worker: EncoderWorker, tmp_path: Path
) -> None:
    (tmp_path / "another-mark").touch()
    worker.share(tmp_path, "mark")
    content = worker._handed_over(TABLE)
    assert isinstance(content, pa.Buffer)
    assert pq.read_table(io.BytesIO(content)) == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["another-mark"]


def test_full_disk_or_a_folder_that_went_lets_the_driver_write(
    worker: EncoderWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mark").touch()
    worker.share(tmp_path, "mark")
    with monkeypatch.context() as patch:

        def fail(path: Path, content: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(durable, "write_bytes", fail)
        assert isinstance(worker._handed_over(TABLE), pa.Buffer)
    (tmp_path / "mark").unlink()
    tmp_path.rmdir()
    assert isinstance(worker._handed_over(TABLE), pa.Buffer)


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_what_servers_answer_is_kept_for_workers_of_one_machine(
    tmp_path: Path, embedding_server: EmbeddingServer, *, is_same_machine: bool
) -> None:
    (tmp_path / "handed-over").mkdir()
    (tmp_path / "handed-over" / "mark").write_text(socket.gethostname() if is_same_machine else "another")
    for _ in range(2):
        config = encoder_config({"model": embedding_server.model})
        worker = EncoderWorker(IngestConfig(encoder=config))
        worker._encoder = EndpointEncoder(config)
        worker.share(tmp_path / "handed-over", "mark")
        worker._encoder.encode(["an old stone"])
        worker.close()
    assert embedding_server.embedded["an old stone"] == (1 if is_same_machine else 2)
