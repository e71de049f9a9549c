"""A worker hands shards over in a folder that it shares with the driver, or as bytes."""

from __future__ import annotations

import errno
import pickle
import shutil
import socket
from pathlib import Path

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.endpoint import EndpointEncoder
from cairn.pipeline.line.encoder_worker import HANDED_OVER, EncoderWorker, shard_left
from cairn.pipeline.line.engine import EncodedShard
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.embedding_server import EmbeddingServer

STAGED = b"a staged shard"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EncoderWorker:
    """A worker whose tables have the content of the shard; the driver has staged one."""
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "000000.parquet").write_bytes(STAGED)
    (tmp_path / HANDED_OVER).mkdir()
    (tmp_path / HANDED_OVER / "mark").touch()
    monkeypatch.setattr(
        EncoderWorker,
        "encode_shard",
        lambda _, content: EncodedShard(
            documents=content, chunks=content * 2, num_documents=12, num_characters=100_000, num_tokens=25_000
        ),
    )
    return EncoderWorker(IngestConfig())


def test_shard_is_left_beside_the_drivers_and_costs_it_few_bytes(
    worker: EncoderWorker, tmp_path: Path
) -> None:
    worker.share(tmp_path / "staged", "mark")
    first, second = (worker.encode_staged("000000.parquet") for _ in range(2))
    assert isinstance(first, tuple)
    assert first != second
    found = shard_left(tmp_path / "staged", first)
    assert isinstance(found.documents, Path)
    assert isinstance(found.chunks, Path)
    assert (found.documents.read_bytes(), found.chunks.read_bytes()) == (STAGED, STAGED * 2)
    assert found.num_tokens == 25_000
    assert len(pickle.dumps("000000.parquet")) + len(pickle.dumps(first)) <= 100
    assert worker.encode_staged("000001.parquet") is None


def test_folder_of_another_machine_with_the_same_name_is_not_shared(
    worker: EncoderWorker, tmp_path: Path
) -> None:
    worker.share(tmp_path / "staged", "another-mark")
    assert worker.encode_staged("000000.parquet") is None
    shard = worker.encode_staged(STAGED)
    assert isinstance(shard, EncodedShard)
    assert shard.documents == STAGED
    assert [path.name for path in (tmp_path / HANDED_OVER).iterdir()] == ["mark"]


def test_full_disk_or_a_folder_that_went_lets_the_driver_write(
    worker: EncoderWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.share(tmp_path / "staged", "mark")
    with monkeypatch.context() as patch:

        def fail(path: Path, content: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(durable, "write_bytes", fail)
        assert isinstance(worker.encode_staged("000000.parquet"), EncodedShard)
    shutil.rmtree(tmp_path / HANDED_OVER)
    assert isinstance(worker.encode_staged("000000.parquet"), EncodedShard)


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_what_servers_answer_is_kept_for_workers_of_one_machine(
    tmp_path: Path, embedding_server: EmbeddingServer, *, is_same_machine: bool
) -> None:
    (tmp_path / HANDED_OVER).mkdir()
    (tmp_path / HANDED_OVER / "mark").write_text(socket.gethostname() if is_same_machine else "another")
    for _ in range(2):
        config = encoder_config({"model": embedding_server.model})
        worker = EncoderWorker(IngestConfig(encoder=config))
        worker._encoder = EndpointEncoder(config)
        worker.share(tmp_path / "staged", "mark")
        worker._encoder.encode(["an old stone"])
        worker.close()
    assert embedding_server.embedded["an old stone"] == (1 if is_same_machine else 2)
