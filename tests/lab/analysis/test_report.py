from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.analysis.length_collapse import Piece, embed_pieces
from cairn.pipeline.lab.analysis.low_pass import FilterRate
from cairn.pipeline.lab.analysis.report import _trend, analyse_model, read_texts

from tests.lab.analysis.numpy_bert import run_bert

RATE = FilterRate(
    tokens=16,
    temperature=1.0,
    sigma_a=0.7,
    low=0.6,
    high=0.8,
    bound=0.5,
    sigma_s=1.0,
    gaussian_sigma_s=1.0,
    tau_s=1.0,
    values=(0.6, 0.7, 0.8),
)


def test_report_holds_every_analysis_and_is_json(config, texts):
    report = analyse_model(config, texts, temperatures=(1.0, 0.8), chunk_tokens=8)
    read = json.loads(json.dumps(report.to_dict()))

    assert [row["tokens"] for row in read["similarities"]] == [16, 32, 64]
    assert {(row["tokens"], row["temperature"]) for row in read["rates"]} == {
        (tokens, temperature) for tokens in (16, 32, 64) for temperature in (1.0, 0.8)
    }
    assert {(row["tokens"], row["layer"]) for row in read["filters"]} == {
        (tokens, layer) for tokens in (16, 32, 64) for layer in (1, 2)
    }
    assert [row["layout"] for row in read["positions"]] == ["cls", "mean", "lmk"]
    assert [row["k"] for row in read["sides"]] == [1, 2, 5]
    for row in read["similarities"]:
        assert row["cosine"]["1.0"] != row["cosine"]["0.8"]


def test_flow_is_the_mean_of_the_last_two_layers(backbone, rows, tiny_model_folder):
    own = embed_pieces(backbone, [Piece(document=0, ids=rows[0])], last_two=True)[0]
    states = run_bert(tiny_model_folder, [2, *rows[0], 3])[0]
    expected = ((states[-1] + states[-2]) / 2).mean(axis=0)

    np.testing.assert_allclose(own, expected / np.linalg.norm(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.4, 1.5, 1.6), "grows with length, against theorem 3"),
        ((0.1, 0.2, 0.3), "falls with length, as theorem 3 says"),
        ((0.5, 0.72, 0.9), "does not change with length beyond noise"),
    ],
)
def test_finding_says_whether_sigma_a_follows_theorem_3(values, words):
    long = replace(RATE, tokens=512, values=values, sigma_a=float(np.mean(values)))

    assert words in _trend(RATE, long)


def test_texts_come_from_a_file_or_a_folder(tmp_path):
    pq.write_table(pa.table({"text": ["a", None, ""]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": ["b"], "body": [1]}), tmp_path / "2.parquet")

    assert read_texts(tmp_path) == ["a", "b"]
    assert read_texts(tmp_path / "2.parquet", "body") == ["1"]
    with pytest.raises(SchemaError, match="missing: body"):
        read_texts(tmp_path, "body")
    with pytest.raises(SourceError, match="does not exist"):
        read_texts(tmp_path / "nothing")
