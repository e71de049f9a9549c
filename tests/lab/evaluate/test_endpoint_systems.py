"""An endpoint as the base of our rows and of the baselines, by its own vectors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.encode import documents
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.report import ingest_flags
from cairn.pipeline.lab.evaluate.systems import baseline_config, choose_systems
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config


def test_rows_of_an_endpoint_are_ranked_by_its_vectors(embedding_server, judged):
    chosen = {"model": embedding_server.model}
    base, baseline = encoder_config(chosen), baseline_config(chosen, None)
    words, _ = choose_systems(base, baseline, ContextConfig(), ["bm25"], is_whole_table=False)
    assert [result.system.name for result in run_bench(judged, words)] == ["bm25"]
    assert not embedding_server.requests, "word rows ask for nothing"
    patterns = ["cairn/*", "chunks-128", "titled-overlap-128/*"]
    systems, left_out = choose_systems(base, baseline, ContextConfig(), patterns, is_whole_table=False)
    names = [system.name for system in systems]
    assert {"cairn/fused+bm25", "chunks-128", "titled-overlap-128/convex"} <= set(names)
    assert "no states" in left_out["titled-overlap-128/convex+maxsim"]
    assert "endpoint" in left_out["late-128"]
    results = {result.system.name: result for result in run_bench(judged, systems)}
    assert set(results) == set(names)
    assert all(embedding_server.embedded[query] for query in judged.queries)
    for text in judged.texts:  # short texts are one chunk, which the baseline sends as it is
        assert embedding_server.embedded[text.strip()]


def test_rows_of_tokens_that_are_read_here_stand_beside_the_others(
    embedding_server, judged, monkeypatch, tiny_model_folder
):
    monkeypatch.setattr(documents, "TOKEN_READER", str(tiny_model_folder))
    chosen = {"model": embedding_server.model, "token_bytes": 8}
    base, baseline = encoder_config(chosen), baseline_config(chosen, None)
    systems, _ = choose_systems(base, baseline, ContextConfig(), ["cairn/*+bm25"], is_whole_table=False)
    fused, late = run_bench(judged, systems)
    assert (fused.system.name, late.system.name) == ("cairn/fused+bm25", "cairn/late+bm25")
    assert late.cost.index_bytes > fused.cost.index_bytes
    assert any(
        not np.array_equal(one.scores, other.scores) for one, other in zip(fused.run, late.run, strict=True)
    )


def test_endpoint_is_refused_where_a_backbone_is_needed(embedding_server):
    with pytest.raises(ConfigError, match="must run here"):
        load_backbone(encoder_config({"model": embedding_server.model}))


def test_rows_with_and_without_lines_stand_side_by_side(embedding_server, judged, tmp_path):
    chosen = {"model": embedding_server.model, "describe": f"{embedding_server.host}/v1"}
    embedding_server.answer = lambda question: "zebra" if judged.texts[0].strip() in question else "a line"
    base, baseline = encoder_config(chosen), baseline_config(chosen, None)
    patterns = ["cairn/fused+bm25", "undescribed/fused+bm25", "chunks-128"]
    systems, _ = choose_systems(base, baseline, ContextConfig(), patterns, is_whole_table=False)
    assert [system.name for system in systems] == [patterns[2], patterns[1], patterns[0]]
    asking = replace(judged, queries=("zebra",) * len(judged.queries))
    for _ in range(2):  # the second comes from the cache
        results = {result.system.name: result for result in run_bench(asking, systems, cache=tmp_path)}
        firsts = {name: result.run[0].positions[0] for name, result in results.items()}
        assert firsts["cairn/fused+bm25"] == 0
    assert set(embedding_server.questions.values()) == {1}
    flags = ingest_flags(systems[-1])
    assert f"--describe {embedding_server.host}/v1" in flags
    assert "--describe" not in ingest_flags(systems[-2])
