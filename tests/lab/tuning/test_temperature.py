from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.known_items import known_items_of
from cairn.pipeline.lab.evaluate.measures import NDCG
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.significance import compare_paired, verdict_of
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.lab.tuning.temperature import _half, tune_temperature

WORDS = ["stone", "path", "way", "mark", "river", "mountain", "walk", "old", "cat", "mat", "sat", "on", "the"]


@pytest.fixture(scope="module")
def judged() -> RetrievalSet:
    generator = np.random.default_rng(5)
    texts = [
        " ".join(generator.choice(WORDS, 12)) + ". " + " ".join(generator.choice(WORDS, 60)) + "."
        for _ in range(30)
    ]
    return known_items_of("walks", [f"d{n}" for n in range(30)], [""] * 30, texts, 24, 0, {})


@pytest.fixture
def config(tiny_model_folder) -> EncoderConfig:
    return EncoderConfig(model=str(tiny_model_folder), precision="fp32", landmark_interval=16)


def ndcg(judged: RetrievalSet, config: EncoderConfig, documents: float, queries: float) -> np.ndarray:
    """Score a pair of temperatures with the evaluation's own way, from nothing."""
    own = replace(config, temperature=documents, query_temperature=queries)
    system = System(name="cairn/fused", encoding=Encoding(encoder=own), ranking="fused")
    return next(iter(run_bench(judged, [system], ContextConfig()))).values[NDCG]


def test_every_pair_scores_as_an_evaluation_of_it(judged, config):
    report = tune_temperature(judged, config, temperatures=(0.5, 2.0))
    chooses = _half(24, 0)

    assert {(each.documents, each.queries) for each in report.tried} == {
        (d, q) for d in (1.0, 0.5, 2.0) for q in (1.0, 0.5, 2.0)
    }
    for each in report.tried:
        expected = ndcg(judged, config, each.documents, each.queries)[chooses].mean()
        assert each.quality == pytest.approx(expected, abs=1e-6)
    assert report.best.quality == max(each.quality for each in report.tried)


def test_choice_is_tested_on_the_other_queries_alone(judged, config):
    report = tune_temperature(judged, config, temperatures=(0.3, 0.6, 1.7))
    assert report.best != report.as_it_is
    others = ~_half(24, 0)
    best = ndcg(judged, config, report.best.documents, report.best.queries)
    expected = compare_paired(best[others], ndcg(judged, config, 1.0, 1.0)[others], seed=0)

    assert report.test == expected
    assert report.verdict == verdict_of(expected)
    assert bool(report.flags) == (report.verdict == "helps")


def test_rows_by_length_compare_one_side_alone(judged, config):
    report = tune_temperature(judged, config, temperatures=(0.5,))
    rows = {(row.side, row.tokens): row for row in report.by_length}
    before = ndcg(judged, config, 1.0, 1.0)

    assert set(rows) == {("documents", 0), ("queries", 8)}
    for side, pair in (("documents", (0.5, 1.0)), ("queries", (1.0, 0.5))):
        row = next(row for row in report.by_length if row.side == side)
        assert row.comparison == compare_paired(ndcg(judged, config, *pair), before, seed=0)
        assert row.before == pytest.approx(before.mean())


def test_what_was_encoded_is_kept(judged, config, tmp_path):
    first = tune_temperature(judged, config, temperatures=(0.5,), cache=tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    assert len(files) == 2
    assert tune_temperature(judged, config, temperatures=(0.5,), cache=tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
