import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WORDS = ["stone", "path", "way", "mark", "river", "mountain", "walk", "old", "cat", "mat", "sat", "on", "the"]


@pytest.fixture
def collection(call: Any, tiny_model_folder: Path, tmp_path: Path) -> str:
    """Ingest thirty documents of two or more chunks."""
    generator = np.random.default_rng(5)
    texts = [
        " ".join(generator.choice(WORDS, 12)) + ". " + " ".join(generator.choice(WORDS, 60)) + "."
        for _ in range(30)
    ]
    pq.write_table(pa.table({"id": [f"d{n}" for n in range(30)], "text": texts}), tmp_path / "c.parquet")
    options = ["--collection", "c", "--model", str(tiny_model_folder), "--landmark-interval", "16", "--quiet"]
    assert call("ingest", "c.parquet", *options)[0] == 0
    return "c"


def test_tune_shows_what_a_funnel_finds(call: Any, collection: str) -> None:
    code, out, err = call("tune", collection, "--dims", "4,16", "--quiet")
    report = json.loads(call("tune", collection, "--dims", "4,16", "--json", "--quiet")[1])

    assert code == 0
    assert "chunk vectors of 32 dimensions" in out
    assert "the index (flat)" in out
    assert "to do: " in out
    assert err.startswith("warning: 30 documents and 30 queries are too few to tune")
    assert {row["dims"] for row in report["rows"]} == {None, 4, 16}
    assert report["rows"][0]["recall"] == 1.0


def test_tune_chooses_a_temperature_or_says_why_not(call: Any, collection: str) -> None:
    options = ["--temperature", "--try", "0.5", "--quiet"]
    code, out, _ = call("tune", collection, *options)
    report = json.loads(call("tune", collection, *options, "--json")[1])

    assert code == 0
    assert "nDCG@10 by vectors alone" in out
    assert "to do: " in out
    assert (report["documents"], report["queries"]) == (30, 30)
    assert {(each["documents"], each["queries"]) for each in report["tried"]} == {
        (d, q) for d in (1.0, 0.5) for q in (1.0, 0.5)
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperature", "--try", "0"], "a temperature must lie between"),
        (["--try", "0.5"], "--try must come with --temperature"),
        (["--temperature", "--dims", "4"], "--dims must come without --temperature"),
        (["--queries", "5"], "must give 20 queries to be tuned with, got 5"),
        (["--dims", "99"], "dims must lie between 1 and"),
        (["--judged", "nowhere"], "must hold queries.parquet"),
    ],
)
def test_tune_refuses_in_one_sentence(call: Any, collection: str, options: list[str], sentence: str) -> None:
    code, _, err = call("tune", collection, *options, "--quiet")

    assert (code, err.count("\n"), sentence in err) == (2, 1, True)


def test_tune_of_a_collection_that_is_not_there_is_one_sentence(call: Any) -> None:
    code, _, err = call("tune", "c")

    assert (code, err.count("\n"), "must exist under /" in err) == (2, 1, True)
