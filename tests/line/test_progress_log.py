from __future__ import annotations

import pytest
from cairn.pipeline.line import progress_log
from cairn.pipeline.line.progress_log import ProgressLog


def test_each_stage_leaves_a_line():
    lines: list[str] = []
    log = ProgressLog(lines.append)
    log("corpus", 1, 5, "rows")
    log("corpus", 5, 5, "rows")
    log("encode", 70, None, "tokens")
    log.finish()
    log.finish()
    assert [line.rpartition(" seconds=")[0] for line in lines] == [
        "stage=corpus done=5 unit=rows",
        "stage=encode done=70 unit=tokens",
    ]


def test_long_stage_leaves_lines_while_it_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_log, "SILENT_SECONDS", 0.0)
    lines: list[str] = []
    ProgressLog(lines.append)("encode", 3, 9, "tokens")
    assert lines == ["stage=encode done=3 total=9 unit=tokens"]
