"""The log of writes: what was appended is read again, and a part of a record is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.errors import DiskFullError, StorageError
from cairn.pipeline.line import write_log
from cairn.pipeline.line.write_log import WriteLog


def records(path: Path) -> list[int]:
    log = WriteLog(path)
    log.close()
    return [record["number"] for _, record in log.records]


def test_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    for number in range(3):
        log.append({"number": number, "text": "é\u2028"})
    log.close()
    assert records(tmp_path / "writes.log") == [0, 1, 2]


def test_log_cut_at_any_byte_has_all_whole_records_before_it(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    ends = [log.append({"number": number}) for number in range(4)][1:]
    log.close()
    content = (tmp_path / "writes.log").read_bytes()
    for size in range(len(content)):
        path = tmp_path / f"{size}.log"
        path.write_bytes(content[:size])
        assert records(path) == list(range(sum(end <= size for end in ends)))
        assert records(path) == list(range(sum(end <= size for end in ends))), "it was cut there"


def test_flipped_bit_costs_no_record_before_it(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    starts = [log.append({"number": number}) for number in range(3)]
    log.close()
    content = bytearray((tmp_path / "writes.log").read_bytes())
    content[starts[2] + 9] ^= 1
    (tmp_path / "writes.log").write_bytes(content)
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


def test_zeros_at_the_end_are_no_record(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "writes.log")
    log.append({"number": 0})
    log.close()
    with (tmp_path / "writes.log").open("ab") as stream:
        stream.write(bytes(4_096))
    assert records(tmp_path / "writes.log") == [0]


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
