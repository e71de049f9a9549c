from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cairn.cli.lab.evaluate import advice_lines
from cairn.pipeline.config import TITLE_TOKENS, TOKEN_BYTES, EncoderConfig
from cairn.pipeline.lab.evaluate.bench import MAIN_EVIDENCE, Cost, SystemResult
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.measures import NDCG
from cairn.pipeline.lab.evaluate.report import Advice, Report, ingest_flags, is_buildable, search_flags
from cairn.pipeline.lab.evaluate.systems import System, baseline_systems, configured_systems, our_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config, settings_of_a_folder

BASE = EncoderConfig()
INGESTED = replace(BASE, token_bytes=TOKEN_BYTES, title_tokens=TITLE_TOKENS, whole_text_tokens=128)
COST = Cost(encode_seconds=10.0, tokens=1_000, vectors=10, index_bytes=1_000, query_milliseconds=1.0)
NOISE = np.random.default_rng(0).normal(0.0, 0.05, 100)


def result(
    name: str,
    level: float,
    *,
    cost: Cost = COST,
    set_name: str = "a",
    is_baseline: bool = False,
    evidence: float | None = None,
):
    values = {NDCG: level + NOISE * (1 + len(name) % 3)}
    if evidence is not None:
        values[MAIN_EVIDENCE] = np.where(np.arange(100) % 2, np.nan, evidence)
    system = System(name=name, encoding=Encoding(encoder=BASE), ranking="dense" if is_baseline else "chunk")
    return SystemResult(set_name=set_name, system=system, values=values, run=[], cost=cost)


def advised(report: Report) -> Advice:
    advice = report.advise(seed=0)
    assert advice is not None
    return advice


def test_averages_and_quality_are_over_the_sets_that_have_a_measure():
    report = Report([result("x", 0.4, evidence=0.2), result("x", 0.6, set_name="b")])
    mean = (NOISE * 2).mean()

    assert report.averages()["x"] == {
        NDCG: pytest.approx(0.5 + (NOISE * 2).mean()),
        MAIN_EVIDENCE: pytest.approx(0.2),
    }
    assert report.quality("x") == pytest.approx(((0.4 + mean + 0.2) / 2 + 0.6 + mean) / 2)


def test_baseline_is_compared_set_by_set_and_costs_are_added_up():
    results = [result("x", 0.5), result("low", 0.3, is_baseline=True), result("high", 0.4, is_baseline=True)]
    second = [replace(each, set_name="b") for each in results]
    second[2] = result("high", 0.7, set_name="b", is_baseline=True)
    report = Report([*results, *second])

    assert report.best_baseline() == "high"
    assert Report(results[:1]).best_baseline() is None
    assert {name: each.difference for name, each in report.compare("x", "high", NDCG, seed=0)} == {
        "a": pytest.approx(0.1),
        "b": pytest.approx(-0.2),
    }
    costs = advised(Report([results[0], second[0]]))
    assert (costs.encode_seconds, costs.tokens, costs.index_bytes) == (20.0, 2_000, 2_000)
    assert costs.query_milliseconds == 1.0


def test_advice_names_what_the_queries_do_not_tell_apart():
    report = Report([result("a", 0.5), result("b", 0.5), result("c", 0.4)])
    said = "\n".join(advice_lines(report, seed=0))

    assert list(report.not_told_apart("a", seed=0)) == ["b"]
    assert "noise: how these rows differ from a may be chance" in said
    assert "b  +0.0000" in said


def better(name: str, *, by_chance: bool, **changes: Any) -> SystemResult:
    """Return a system that is better than one of level .5, by chance or far."""
    found = result(name, 0.7)
    values = {NDCG: 0.001 + result("x", 0.5).values[NDCG] + 0.1 * (-1.0) ** np.arange(100)}
    system = replace(found.system, **changes)
    return replace(found, values=values if by_chance else found.values, system=system)


@pytest.mark.parametrize(("by_chance", "end"), [(True, "), which may be chance"), (False, ")")])
def test_a_better_baseline_is_named_with_whether_that_may_be_chance(by_chance: bool, end: str):
    baseline = better("plain", by_chance=by_chance, ranking="convex")
    *_, last = advice_lines(Report([result("x", 0.5), baseline]), seed=0)

    assert "the baseline plain is better here (quality " in last
    assert last.endswith(end)


def test_settings_as_given_stand_unless_another_that_an_ingest_builds_is_better_beyond_noise():
    as_given = replace(result("x", 0.5).system, name="cairn/fused+bm25", ranking="fused+bm25")
    given = replace(result("x", 0.5), system=as_given)
    by_noise = Report([given, better("best", by_chance=True)])

    assert by_noise.quality("best") > by_noise.quality("cairn/fused+bm25")
    assert advised(by_noise).system == "cairn/fused+bm25"
    assert advised(Report([given, better("best", by_chance=False)])).system == "best"
    unbuildable = better("convex", by_chance=False, ranking="convex")
    assert advised(Report([unbuildable, result("ours", 0.5)])).system == "ours"
    assert Report([unbuildable]).advise(seed=0) is None


def test_buildable_are_chunks_and_late_chunks_and_ours_without_random_context_or_another_overlap():
    baselines = {system.name for system in baseline_systems(BASE, 512) if is_buildable(system)}
    ours = {system.name.split("/")[1] for system in our_systems(BASE) if is_buildable(system)}

    assert baselines == {"chunks-128", "chunks-256", "late-128"}
    assert ours == {"none", "corpus"}
    for overlap, size in itertools.product((128, 20), (256, 96)):
        base = replace(BASE, window_overlap_tokens=overlap)
        system = our_systems(base, ["none"], ["late"], max_positions=size)[0]
        assert is_buildable(system) == (overlap == 128)


def test_search_flags_leave_token_vectors_out_where_the_measured_system_did():
    default = encoder_config({})
    found = {system.name: search_flags(system) for system in configured_systems(default)}

    assert found == {
        "cairn/document": "--granularity document --no-hybrid --no-late",
        "cairn/chunk": "--granularity chunk --no-hybrid --no-late",
        "cairn/fused": "--no-hybrid --no-late",
        "cairn/fused+bm25": "--no-late",
        "cairn/late": "--no-hybrid",
        "cairn/late+bm25": "",
    }
    assert search_flags(our_systems(BASE, ["none"], ["mean"])[0]).count("--no-late") == 0


def test_ingest_flags_name_what_differs_from_the_defaults_as_ingest_reads_them(tmp_path):
    def flags(base: EncoderConfig, encoder: str = "mean", **more: Any) -> str:
        return ingest_flags(our_systems(base, ["none"], [encoder], **more)[0])

    by_name = {system.name: system for system in (*our_systems(INGESTED), *baseline_systems(INGESTED, 512))}
    of_base = {
        "": flags(INGESTED),
        " --query-prefix 'query: '": flags(replace(INGESTED, query_prefix="query: ")),
        " --temperature 0.9 --causal": flags(replace(INGESTED, temperature=0.9, causal=True)),
        " --attention full --window-tokens 256": flags(INGESTED, "late", max_positions=256),
        " --pooling lmk --attention full": flags(INGESTED, "landmarks"),
        " --pooling lmk --attention full --use-context": ingest_flags(by_name["landmarks/corpus/chunk"]),
        " --attention full --landmark-interval 128 --title-tokens 0 --whole-text-tokens 0 --token-bytes 0": (
            ingest_flags(by_name["late-128"])
        ),
    }
    for expected, said in of_base.items():
        assert said == f"--model all-MiniLM-L6-v2{expected}"
    brought = encoder_config({})
    assert ingest_flags(configured_systems(brought)[0]) == ""
    assert flags(replace(brought, whole_text_tokens=0)) == "--whole-text-tokens 0 --no-context"
    settings = settings_of_a_folder(EncoderConfig(query_prefix="query: ", pool_prefix=True, causal=True))
    (tmp_path / "cairn_config.json").write_text(json.dumps(settings))
    off = replace(encoder_config({"model": str(tmp_path)}), pool_prefix=False, causal=False)
    said = ingest_flags(configured_systems(off)[0])
    assert said == f"--model {tmp_path} --bidirectional --no-pool-prefix"


def test_report_as_json_has_means_costs_comparisons_and_advice():
    report = Report([result("x", 0.5), result("low", 0.3, is_baseline=True)])
    read = json.loads(json.dumps(report.to_dict("low", seed=0)))

    assert read["systems"]["x"]["a"]["cost"]["encode_seconds"] == 10.0
    assert read["comparisons"]["x"][NDCG]["a"]["difference"] == pytest.approx(
        report.averages()["x"][NDCG] - report.averages()["low"][NDCG]
    )
    assert read["advice"][0]["system"] == "x"
    assert list(read["not_told_apart"]) == []
