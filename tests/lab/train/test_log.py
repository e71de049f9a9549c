from __future__ import annotations

from pathlib import Path

from cairn.pipeline.lab.train.trainer import TrainingLog, read_log


def test_training_log_resumed_tells_no_step_twice(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    log = TrainingLog(path)
    log.append({"step": 1, "loss": 2.0})
    kept = log.size
    log.append({"step": 2, "loss": 1.5})
    again = TrainingLog(path, kept)
    again.append({"step": 2, "loss": 1.25})
    assert read_log(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.25}]


def test_read_log_leaves_out_a_line_that_was_being_written(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "none.jsonl") == []
