from __future__ import annotations

import pytest
from cairn.pipeline.line import progress_log
from cairn.pipeline.line.progress_log import ProgressLog


def test_each_stage_leaves_a_line_at_its_end_and_a_long_one_while_it_works(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    log = ProgressLog(lines.append)
    log("corpus", 1, 5, "rows")
    log("corpus", 5, 5, "rows")
    monkeypatch.setattr(progress_log, "SILENT_SECONDS", 0.0)
    log("encode", 70, 90, "tokens")
    log.finish()
    log.finish()
    assert [line.partition(" seconds=")[0] for line in lines] == [
        "stage=corpus done=5 unit=rows",
        "stage=encode done=70 total=90 unit=tokens",
        "stage=encode done=70 unit=tokens",
    ]
