"""Systems scored on a set, models on dev sets, and a search scored by MTEB."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate import encodings
from cairn.pipeline.lab.evaluate.bench import (
    EVIDENCE_MEASURES,
    run_bench,
)
from cairn.pipeline.lab.evaluate.dev_scores import DevScorer
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.measures import DOCUMENT_MEASURES
from cairn.pipeline.lab.evaluate.public import SearchModel
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import System, baseline_systems, configured_systems, our_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import ModelScorer

CONTEXT = ContextConfig(context_documents=3)


def systems(tiny_config):
    return [
        *baseline_systems(tiny_config, 96),
        *our_systems(tiny_config, ["none", "corpus"], ["mean", "landmarks"]),
    ]


def count_encodings(monkeypatch) -> list[Encoding]:
    """Return a list that every pass of the encoder adds to."""
    encoded: list[Encoding] = []
    original = encodings.encoded_arrays

    def counting(encoder, judged, encoding, *rest):
        encoded.append(encoding)
        return original(encoder, judged, encoding, *rest)

    monkeypatch.setattr(encodings, "encoded_arrays", counting)
    return encoded


def test_every_system_is_scored_with_every_measure_and_each_encoding_encoded_once(
    judged, tiny_config, monkeypatch, tmp_path
):
    encoded = count_encodings(monkeypatch)
    first, second = (
        {
            result.system.name: result
            for result in run_bench(judged, systems(tiny_config), CONTEXT, cache=tmp_path / "cache")
        }
        for _ in range(2)
    )

    assert sorted(first) == sorted(system.name for system in systems(tiny_config))
    for name, result in first.items():
        assert set(result.values) == {*DOCUMENT_MEASURES, *EVIDENCE_MEASURES}
        assert all(0.0 <= value <= 1.0 for value in result.means().values())
        assert second[name].means() == result.means()
        assert second[name].cost.encode_seconds == result.cost.encode_seconds
    read = {system.encoding for system in systems(tiny_config) if system.reads_vectors}
    assert len(encoded) == len(set(encoded)) == len(read) == 4


def test_bm25_encodes_nothing_and_no_result_depends_on_the_others(judged, tiny_config, monkeypatch):
    together = {
        result.system.name: result.means() for result in run_bench(judged, systems(tiny_config), CONTEXT)
    }
    for system in systems(tiny_config)[1::5]:
        assert next(run_bench(judged, [system], CONTEXT)).means() == pytest.approx(together[system.name])
    monkeypatch.setattr(DocumentEncoder, "encode", None)
    monkeypatch.setattr(DocumentEncoder, "encode_queries", None)
    bm25 = next(each for each in systems(tiny_config) if each.name == "bm25")
    (alone,) = run_bench(judged, [bm25], CONTEXT)

    assert alone.means() == together["bm25"]
    assert alone.means()["evidence@1000"] > 0


def test_queries_without_evidence_have_no_evidence_value(judged, tiny_config):
    result = next(run_bench(judged, our_systems(tiny_config, ["none"], ["mean"])))

    assert np.isnan(result.values["evidence@1000"]).tolist() == [False, False, True]
    assert not np.isnan(result.values["nDCG@10"]).any()
    results = run_bench(without_evidence(judged, "bare"), baseline_systems(tiny_config, 96))
    assert {name for result in results for name in result.values} == set(DOCUMENT_MEASURES)


def test_cost_counts_what_a_ranking_reads_and_overlapping_pieces_are_encoded_once(
    judged, tiny_config, monkeypatch
):
    encoding = Encoding(encoder=replace(tiny_config, landmark_interval=16), has_titles=True, stride_tokens=8)
    rankings = ("dense", "convex", "convex+maxsim")
    pieces = [System(name=ranking, encoding=encoding, ranking=ranking) for ranking in rankings]
    encoded, ours = count_encodings(monkeypatch), our_systems(tiny_config, ["none"], ["mean"])
    bm25 = baseline_systems(tiny_config, 96)
    results = {result.system.name: result for result in run_bench(judged, [*pieces, *bm25, *ours])}
    costs = {name.removeprefix("mean/none/"): result.cost for name, result in results.items()}
    chunks = costs["chunk"].vectors

    assert chunks > 4
    assert costs["document"].vectors == 4
    assert costs["fused"].vectors == 4 + chunks
    assert costs["fused"].index_bytes == (4 + chunks) * 32 * 4
    assert costs["fused+bm25"].index_bytes > costs["fused"].index_bytes
    assert costs["bm25"].vectors == costs["bm25"].tokens == 0
    assert len(encoded) == 2
    for ranking in rankings:
        assert set(results[ranking].values) == {*DOCUMENT_MEASURES, *EVIDENCE_MEASURES}
    assert costs["dense"].index_bytes == 4 * 32 * costs["dense"].vectors
    assert costs["convex"].index_bytes > costs["dense"].index_bytes
    assert costs["convex+maxsim"].index_bytes == costs["convex"].index_bytes + 2 * 32 * costs["dense"].tokens


def without_evidence(judged: RetrievalSet, name: str) -> RetrievalSet:
    spans = judged.judgements
    bare = replace(spans, start_J=spans.start_J * 0 - 1, end_J=spans.end_J * 0 - 1)
    return replace(judged, name=name, judgements=bare)


def test_dev_score_is_the_mean_over_sets_of_what_the_table_says(judged, tiny_model_folder):
    bare = without_evidence(judged, "bare")
    scorer = DevScorer([judged, bare], precision="fp32")
    scores = scorer.score(tiny_model_folder)
    config = encoder_config({"model": str(tiny_model_folder), "precision": "fp32"})
    system = next(each for each in configured_systems(config) if each.name == "cairn/fused")
    [expected] = run_bench(judged, [system], ContextConfig())
    means = expected.means()
    named = {
        f"{judged.name}/nDCG@10": means["nDCG@10"],
        f"{judged.name}/evidence@2000": means["evidence@2000"],
    }
    assert scores.by_measure == pytest.approx({**named, "bare/nDCG@10": means["nDCG@10"]})
    assert scores.mean == pytest.approx(fmean([fmean(named.values()), means["nDCG@10"]]))
    assert isinstance(scorer, ModelScorer)


def test_dev_scorer_fingerprint_is_that_of_texts_and_judgements(judged, monkeypatch):
    assert DevScorer([judged]).fingerprint == DevScorer([replace(judged, titles=judged.titles)]).fingerprint
    others = [
        without_evidence(judged, judged.name),
        replace(judged, queries=("another", *judged.queries[1:])),
    ]
    assert len({DevScorer([each]).fingerprint for each in (judged, *others)}) == 3
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(ConfigError, match="ir_measures"):
        DevScorer([judged])


class Rows(dict[str, list[str]]):
    """What MTEB hands over: columns by name."""

    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self["id"])


class Task:
    name = "stones"


CORPUS = Rows(id=["a", "b", "c"], text=["the stone path", "a river in spring", ""], title=["", "River", ""])
QUERIES = Rows(id=["q1", "q2"], text=["river in spring", "stone path"])


def test_search_ranks_the_documents_of_a_task(tiny_model_folder, tmp_path):
    model = SearchModel(model=str(tiny_model_folder), cache=str(tmp_path), title_tokens=0)
    model.index(CORPUS, task_metadata=Task())
    found = model.search(QUERIES, top_k=2)
    assert {query: max(scores, key=scores.__getitem__) for query, scores in found.items()} == {
        "q1": "b",
        "q2": "a",
    }
    assert all(len(scores) == 2 for scores in found.values())


@pytest.mark.slow
def test_mteb_scores_the_search(tiny_model_folder):
    mteb = pytest.importorskip("mteb")
    from mteb.mocks.mock_tasks.retrieval import MockRetrievalTask

    result = mteb.evaluate(
        SearchModel(model=str(tiny_model_folder), title_tokens=0), MockRetrievalTask(), cache=None
    )
    assert 0 < result.task_results[0].get_score() <= 1


def test_printed_commands_are_python_with_the_chosen_settings(capsys):
    assert run(cairn, ["evaluate", "--public", "--title-tokens", "8"], "cairn") == 0
    told = capsys.readouterr().out
    commands = [line for line in told.splitlines() if line.startswith("env ")]
    for name, command in zip(("BEIR", "LongEmbed"), commands, strict=True):
        code = shlex.split(command)[-1]
        compile(code, name, "exec")
        assert re.search(rf"SearchModel\(model='cairn-minilm', title_tokens=8\), .*{name}", code)


def test_evaluate_without_folder_or_public_is_refused(capsys):
    assert run(cairn, ["evaluate"], "cairn") == 2
    assert "Missing argument 'FOLDER...'" in capsys.readouterr().err
