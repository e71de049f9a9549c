from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.trainer import log_path_of


def test_a_log_replaces_no_file(tmp_path: Path):
    assert log_path_of(tmp_path / "mixer") == tmp_path / "mixer.jsonl"
    (tmp_path / "mixer.jsonl").write_text("pairs")
    with pytest.raises(ConfigError, match="must not replace a file"):
        log_path_of(tmp_path / "mixer")
