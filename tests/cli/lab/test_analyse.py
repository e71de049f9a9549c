import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WORDS = "the cat sat on the mat old stone marks a way past the river and mountain path"


@pytest.fixture
def texts(tmp_path: Path) -> str:
    rows = [" ".join([WORDS] * repeats) for repeats in (2, 3, 5)]
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": rows}), tmp_path / "corpus.parquet")
    return str(tmp_path / "corpus.parquet")


def test_analyse_prints_findings_and_tables(call: Any, tiny_model_folder: Path, texts: str) -> None:
    code, out, _ = call("analyse", str(tiny_model_folder), "--texts", texts, "--chunk-tokens", "8", "--quiet")

    assert code == 0
    assert "- τ = 1: sigma_a " in out
    for title in ("figure 1c", "theorem 3", "theorem 2", "(landmark pooling, figure 2)", "section 6.4"):
        assert title in out


def test_analyse_in_json_holds_the_temperatures_asked_for(
    call: Any, tiny_model_folder: Path, texts: str
) -> None:
    options = ["--temperature", "0.5", "--layers", "1", "--max-tokens", "16", "--json", "--quiet"]
    code, out, _ = call("analyse", str(tiny_model_folder), "--texts", texts, *options)
    read = json.loads(out)

    assert code == 0
    assert [(row["tokens"], row["temperature"]) for row in read["rates"]] == [(16, 0.5)]
    assert [row["layer"] for row in read["filters"]] == [1]
    assert read["sides"] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperature", "0"], "a temperature must lie between"),
        (["--text-column", "body"], "missing: body"),
        (["--max-tokens", "8"], "must have two texts of 8 tokens or more"),
    ],
)
def test_analyse_refuses_in_one_sentence(
    call: Any, tiny_model_folder: Path, texts: str, options: list[str], sentence: str
) -> None:
    code, _, err = call("analyse", str(tiny_model_folder), "--texts", texts, *options, "--quiet")

    assert (code, err.count("\n"), sentence in err) == (2, 1, True)
