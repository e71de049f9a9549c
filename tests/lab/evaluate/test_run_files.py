from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.evaluate.measures import (
    RankedDocuments,
    document_measures,
    measure_run,
    read_run,
    write_run,
)


def ranked(judged) -> list[RankedDocuments]:
    generator = np.random.default_rng(0)
    return [
        RankedDocuments.of(generator.permutation(len(judged.doc_ids)), np.array([0.9, 0.1, 0.1, -0.3]))
        for _ in judged.query_ids
    ]


def test_run_written_has_the_six_columns_of_trec(tmp_path, judged):
    run = ranked(judged)
    write_run(tmp_path / "runs" / "a.trec", judged, run, "tag")
    first = (tmp_path / "runs" / "a.trec").read_text().splitlines()[0].split()

    assert first == [
        "q1",
        "Q0",
        judged.doc_ids[run[0].positions[0]],
        "1",
        repr(float(np.float32(0.9))),
        "tag",
    ]


def test_run_read_back_measures_the_same(tmp_path, judged):
    run = ranked(judged)
    write_run(tmp_path / "a.trec", judged, run, "tag")
    before, after = document_measures(judged, run), measure_run(judged, read_run(tmp_path / "a.trec"))

    assert {name: x.tolist() for name, x in before.items()} == {name: x.tolist() for name, x in after.items()}


@pytest.mark.parametrize("line", ["q1 Q0 a 1 0.5", "q1 Q0 a 1 high tag"])
def test_line_that_is_not_of_a_run_is_refused_by_number(tmp_path, line):
    (tmp_path / "a.trec").write_text(f"q1 Q0 b 1 0.7 tag\n{line}\n")

    with pytest.raises(SourceError, match=r"line 2 of a\.trec must read"):
        read_run(tmp_path / "a.trec")


def test_run_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(SourceError, match="must be a readable text file"):
        read_run(tmp_path / "none.trec")
