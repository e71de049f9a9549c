from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate import measures
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.dev_scores import DevScorer
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import configured_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import ModelScorer


def without_evidence(judged: RetrievalSet, name: str) -> RetrievalSet:
    spans = judged.judgements
    bare = replace(spans, start_J=spans.start_J * 0 - 1, end_J=spans.end_J * 0 - 1)
    return replace(judged, name=name, judgements=bare)


def test_dev_score_is_the_mean_over_sets_of_what_the_table_says(
    judged: RetrievalSet, tiny_model_folder: Path
):
    bare = without_evidence(judged, "bare")
    scorer = DevScorer([judged, bare], precision="fp32")
    scores = scorer.score(tiny_model_folder)
    system = next(
        each
        for each in configured_systems(encoder_config({"model": str(tiny_model_folder), "precision": "fp32"}))
        if each.name == "cairn/fused"
    )
    [expected] = run_bench(judged, [system], ContextConfig())
    means = expected.means()
    named = {
        f"{judged.name}/nDCG@10": means["nDCG@10"],
        f"{judged.name}/evidence@2000": means["evidence@2000"],
    }
    assert scores.by_measure == pytest.approx({**named, "bare/nDCG@10": means["nDCG@10"]})
    assert scores.mean == pytest.approx(fmean([fmean(named.values()), means["nDCG@10"]]))
    assert isinstance(scorer, ModelScorer)


def test_dev_scorer_fingerprint_is_that_of_texts_and_judgements(judged: RetrievalSet):
    assert DevScorer([judged]).fingerprint == DevScorer([replace(judged, titles=judged.titles)]).fingerprint
    others = [
        without_evidence(judged, judged.name),
        replace(judged, queries=("another", *judged.queries[1:])),
    ]
    assert len({DevScorer([each]).fingerprint for each in (judged, *others)}) == 3


def test_dev_scorer_without_ir_measures_says_so_before_anything_is_trained(
    judged: RetrievalSet, monkeypatch: pytest.MonkeyPatch
):
    def absent() -> None:
        raise ConfigError("evaluating must have the package ir_measures, got none")

    monkeypatch.setattr(measures, "_ir_measures", absent)
    with pytest.raises(ConfigError, match="ir_measures"):
        DevScorer([judged])
