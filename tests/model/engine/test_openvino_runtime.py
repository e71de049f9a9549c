from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPORTED = """
import os, sys
forks = []
os.register_at_fork(before=lambda: forks.append(1))
from cairn.pipeline.model.engine.openvino_backbone import ov
import time
time.sleep(0.2)
print(ov.__name__, len(forks), "openvino_telemetry" in sys.modules)
"""


def test_import_of_the_runtime_reports_to_nobody(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "HOME": str(tmp_path)
    }
    run = subprocess.run(
        [sys.executable, "-c", REPORTED], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["openvino", "0", "False"]
    assert list(tmp_path.iterdir()) == []
