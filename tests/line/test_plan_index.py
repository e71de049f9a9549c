"""What an ingest would do and cost, against what it then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.transformer import Transformer

from tests.small_ingests import document, write_rows


def corpus(path: Path, numbers: range) -> str:
    return write_rows(path, [document(number) for number in numbers])


def test_plan_counts_what_the_ingest_then_does_and_writes_nothing(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    source = corpus(tmp_path / "a.parquet", range(9))
    plan = plan_index([source], root, "c", config)
    assert not root.exists()
    report = build_index([source], root, "c", config)
    counted = ("rows", "indexed", "quarantined")
    assert [plan[name] for name in counted] == [getattr(report, name) for name in counted]
    assert plan["estimated_tokens"] == report.tokens
    assert plan["estimated_encode_seconds"] > 0
    assert plan_index([source], root, "c", config)["unchanged"] == 9


def test_plan_of_a_first_ingest_warns_of_languages_and_columns_as_the_ingest_does(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    text = "Die Kündigungsfrist beträgt nach der Probezeit vier Wochen zum Monatsende."
    (tmp_path / "a.csv").write_text(f'id,text,price\n1,{text},"1,5"\n')
    plan = plan_index([str(tmp_path / "a.csv")], root, "c", config)["warnings"]
    report = build_index([str(tmp_path / "a.csv")], root, "c", config)
    assert sorted(plan) == sorted(report.warnings)
    assert {"BM25", "numbers"} <= {warning.split()[0] for warning in plan}


def test_plan_of_new_documents_leaves_out_the_context_that_is_drawn_already(
    root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    build_index([corpus(tmp_path / "a.parquet", range(9))], root, "c", config)
    plan = plan_index([corpus(tmp_path / "b.parquet", range(9, 12))], root, "c", config)
    assert plan["estimated_tokens"] > 0
    assert plan["estimated_encode_seconds"] > 0
    assert plan["estimated_context_seconds"] == 0


def test_plan_times_the_first_stage_over_the_documents_it_is_to_embed(
    root: Path, tmp_path: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, clock_seconds = ContextEncoder.embed, 0.0

    def slow(self: ContextEncoder, texts: Any) -> Any:
        nonlocal clock_seconds
        clock_seconds += 0.1 * len(texts)
        return embed(self, texts)

    monkeypatch.setattr(ContextEncoder, "embed", slow)
    monkeypatch.setattr(
        "cairn.pipeline.line.plan_index.time", SimpleNamespace(monotonic=lambda: clock_seconds)
    )
    source = corpus(tmp_path / "a.parquet", range(6))
    reads = replace(config, encoder=replace(config.encoder, use_context=True))
    clustered = replace(config.cluster, surrogate="encoder")
    expected = (
        (replace(reads, context=replace(config.context, context_documents=1)), 0.1),
        (reads, 0.6),
        (replace(reads, cluster=clustered), 1.8),
        (config, 0.0),
        (replace(config, cluster=clustered), 1.2),
    )
    assert config.context.context_documents >= 6
    for settings, seconds in expected:
        plan = plan_index([source], root, "c", settings)
        assert plan["estimated_context_seconds"] == pytest.approx(seconds)


def test_plan_with_context_encodes_the_sample_behind_as_many_vectors_as_will_be_drawn(
    root: Path, tmp_path: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    hidden_states = Transformer.hidden_states

    def recording(self: Any, ids: Any, lengths: Any, context: Any = None, *rest: Any) -> Any:
        seen.add(0 if context is None else len(context))
        return hidden_states(self, ids, lengths, context, *rest)

    monkeypatch.setattr(Transformer, "hidden_states", recording)
    source = corpus(tmp_path / "a.parquet", range(6))
    plan_index([source], root, "c", replace(config, encoder=replace(config.encoder, use_context=True)))
    assert seen == {0, 6}
