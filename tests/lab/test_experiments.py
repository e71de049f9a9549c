"""`cairn experiment`: each claim's smallest setting, results that go on, and intervals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from cairn.pipeline.encode.encoder import Encoder
from cairn.pipeline.lab import experiments
from cairn.pipeline.lab.evaluate.encodings import build_encoder
from cairn.pipeline.lab.evaluate.retrieval_set import read_retrieval_set
from cairn.pipeline.lab.experiments import ExperimentReport, interval, run_experiment
from cairn.pipeline.lab.train.settings import ExperimentConfig, ExperimentName

from tests.lab.evaluate.conftest import write_set
from tests.lab.train.conftest import tiny_pairs

SMALLEST = ExperimentConfig(
    seeds=1,
    steps=1,
    batch_pairs=8,
    max_document_tokens=16,
    context_documents=2,
    lengths=(128, 256),
    max_queries=4,
    max_documents=8,
)


def judged_set(folder: Path, seed: int) -> Path:
    """Write a judged set of twelve documents, each with its query."""
    records = [(f"{seed}-{number}", each) for number, each in enumerate(tiny_pairs(12, seed))]
    texts, queries = (
        [{"id": name, "text": each[side]} for name, each in records] for side in ("document", "query")
    )
    qrels = [{"query_id": name, "doc_id": name, "score": 1} for name, _ in records]
    return write_set(folder, texts, queries, qrels)


@pytest.fixture
def data(tmp_path):
    """Return pairs, two judged sets, and long texts of sentences."""
    sentences = [
        f"The {['stone', 'river', 'cat'][number % 3]} of {number} stood beside the old path by the mountain"
        for number in range(400)
    ]
    texts = [{"text": ". ".join(sentences[start : start + 20])} for start in range(0, 400, 20)]
    for name, rows in (("pairs", tiny_pairs(60)), ("texts", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [judged_set(tmp_path / name, seed) for name, seed in (("first", 7), ("second", 8))]
    return {"sources": [tmp_path / "pairs.jsonl"], "judged": sets, "texts": [tmp_path / "texts.jsonl"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(ExperimentName))
def test_experiment_in_its_smallest_setting_scores_every_query_and_is_not_made_again(
    name, data, tmp_path, monkeypatch
):
    found = run_experiment(name, tmp_path / "out", SMALLEST, **data)
    num_queries = 4 if name == "lmk" else 8
    for rows in found.values():
        for row, values_SQ in rows.items():
            assert values_SQ.shape[0] == 1
            assert values_SQ.shape[1] == num_queries or "longest" in row
            assert np.isfinite(values_SQ).all()
            assert (values_SQ >= 0).all()
    assert len(found) >= 2
    assert [path.name for path in (tmp_path / "out" / name).iterdir()] == ["results.jsonl"]
    monkeypatch.setattr(experiments.Laboratory, "scored", None)
    again = run_experiment(name, tmp_path / "out", SMALLEST, **data)
    assert again.to_dict() == found.to_dict()


def test_experiment_that_died_measures_what_is_missing_and_cuts_a_half_written_line(
    data, tmp_path, monkeypatch
):
    asked: list[float] = []

    def scored(self, model, *, temperature, query_temperature, **served):
        asked.append(temperature * 100 + query_temperature)
        return np.full(8, temperature)

    monkeypatch.setattr(experiments.Laboratory, "scored", scored)
    whole = run_experiment("tempscale", tmp_path / "out", SMALLEST, **data)
    path = tmp_path / "out" / "tempscale" / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40])
    first, asked[:] = list(asked), []
    assert run_experiment("tempscale", tmp_path / "out", SMALLEST, **data).to_dict() == whole.to_dict()
    assert asked == first[3:]
    assert path.read_text() == "".join(lines)


def test_context_of_training_documents_is_of_random_ones_of_the_pairs_alike_for_all_sets(
    data, tmp_path, tiny_model_folder, monkeypatch
):
    encoders: list[Encoder] = []

    def kept(*asked):
        encoder, seconds = build_encoder(*asked)
        encoders.append(encoder)
        return encoder, seconds

    model = shutil.copytree(tiny_model_folder, tmp_path / "model")
    trained = {"context": {"context_documents": 5, "max_document_tokens": 16, "pooling": "mean"}}
    (model / "cairn_config.json").write_text(json.dumps({"format": 1, "encoder": {}, **trained}))
    lab = experiments.Laboratory(
        folder=tmp_path,
        sources=data["sources"],
        texts=(),
        judged=[read_retrieval_set(each) for each in data["judged"]],
        config=SMALLEST,
    )
    monkeypatch.setattr(experiments, "build_encoder", kept)
    for kind in ("training", "own", "other"):
        assert lab.scored(model, kind).shape == (24,)
    first, second, own, _, _, others = (encoder.fingerprint for encoder in encoders)
    assert first == second
    assert first != own == others
    drawn = lab.training_documents(5, 0).texts
    different = list(dict.fromkeys(record["document"] for record in tiny_pairs(60)))
    assert len(set(drawn)) == 5
    assert set(drawn) <= set(different)
    assert set(drawn) != set(different[:5])


def test_interval_equals_naive_draws_of_seeds_and_of_queries_for_all_seeds():
    difference_SQ = np.random.default_rng(3).normal(0.1, 1.0, (3, 40))
    generator = np.random.default_rng(5)
    means = [
        difference_SQ[np.ix_(generator.integers(0, 3, 3), generator.integers(0, 40, 40))].mean()
        for _ in range(10_000)
    ]
    said = interval(difference_SQ).replace("(", "").replace(")", "").replace("to", "").split()
    assert float(said[0]) == pytest.approx(difference_SQ.mean(), abs=6e-4)
    assert [float(said[1]), float(said[2])] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.02)


def test_report_says_differences_in_the_same_row_and_gains_of_the_own_context():
    plain = {"context own": np.array([[0.2, 0.4]]), "context none": np.array([[0.2, 0.4]])}
    reads = {"context own": np.array([[0.5, 0.5]]), "context none": np.array([[0.3, 0.3]])}
    said = ExperimentReport({"plain": plain, "context": reads}).to_dict()
    assert said["plain | context own"] == "0.300"
    assert said["context | context own"].startswith("0.500  +0.200 (")
    assert said["context | own over context none"] == "+0.200 (+0.200 to +0.200)"
