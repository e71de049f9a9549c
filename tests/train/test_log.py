from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from pipeline.train.log import TrainingLog, plot, read_log, write_plot


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


def test_plot_draws_a_panel_for_each_curve_that_was_logged(tmp_path: Path):
    records = [{"step": step, "loss": 3.0 / step} for step in range(1, 6)] + [
        {"step": 5, "heldout_ndcg_at_10": 0.5}
    ]
    drawing = ET.fromstring(plot(records))
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert heights == sorted(heights)  # a loss that falls goes down the page
    write_plot(tmp_path / "absent.jsonl", tmp_path / "log.svg")
    assert ET.parse(tmp_path / "log.svg").getroot().tag.endswith("svg")
