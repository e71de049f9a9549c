from __future__ import annotations

from dataclasses import replace

import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate import systems
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.systems import (
    baseline_systems,
    choose_systems,
    configured_systems,
    our_systems,
    select_systems,
    varied,
)
from cairn.pipeline.model.backbone_loader import load_backbone

BASE = EncoderConfig()


def test_baselines_are_those_of_a_rag_pipeline():
    pieces = ("overlap", "titled-overlap")
    sizes = [f"{name}-{size}" for name in ("chunks", "titled") for size in (128, 256)]
    assert {system.name for system in baseline_systems(BASE, 512)} == {
        *("bm25", *sizes, "late-128"),
        *(f"{name}-{size}/{way}" for name in pieces for size in (128, 256) for way in ("dense", "convex")),
        "titled-overlap-128/convex+maxsim",
    }
    other = EncoderConfig(pooling="lmk", attention="full", landmark_interval=32, landmarks="sentence")
    assert baseline_systems(other, 512) == baseline_systems(BASE, 512), "whatever the base chunks by"
    shared = {each.encoding for each in baseline_systems(BASE, 512) if each.name.startswith("overlap-128")}
    assert (len(shared), len({system.encoding for system in our_systems(BASE)})) == (1, 12)
    assert [system.name for system in baseline_systems(BASE, 96)] == ["bm25"]
    names = {system.name for system in baseline_systems(BASE, 264, prefix_tokens=10)}
    assert {"chunks-128", "chunks-256"} & names == {"chunks-128"}


def test_configured_systems_take_the_configuration_as_it_is():
    base = EncoderConfig(use_context=True)
    systems = configured_systems(base)

    assert {system.encoding for system in systems} == {Encoding(encoder=base, context="corpus")}
    assert [system.name for system in systems] == [
        "cairn/document",
        "cairn/chunk",
        "cairn/fused",
        "cairn/fused+bm25",
    ]


def test_selection_keeps_the_order_of_the_table():
    systems = baseline_systems(BASE, 512)

    assert [system.name for system in select_systems(systems, ["late-*", "chunks-???"])] == [
        "chunks-128",
        "chunks-256",
        "late-128",
    ]
    assert select_systems(systems, []) == systems
    with pytest.raises(ConfigError, match="no row of the table matches 'chunk'; did you mean 'chunks-256'"):
        select_systems(systems, ["chunk"])


def test_window_and_pooled_prefix_go_with_what_varies():
    short = varied(BASE, 96, attention="full")
    assert (short.window_tokens, short.window_overlap_tokens) == (96, 48)
    assert varied(EncoderConfig(attention="full", window_tokens=256), 512).window_tokens == 256
    base = EncoderConfig(document_prefix="text: ", pool_prefix=True)
    assert varied(base, landmark_interval=128).pool_prefix
    assert not varied(base, pooling="cls").pool_prefix
    assert not varied(base, attention="full").pool_prefix


def test_baselines_pool_as_the_model_does_and_know_no_temperature():
    systems = baseline_systems(
        EncoderConfig(pooling="cls", temperature=0.9, query_temperature=0.8, use_context=True),
        512,
    )
    by_name = {system.name: system.encoding.encoder for system in systems}

    assert (by_name["chunks-128"].pooling, by_name["late-128"].pooling) == ("cls", "mean")
    assert {
        (config.temperature, config.query_temperature, config.use_context) for config in by_name.values()
    } == {(1.0, None, False)}


def test_context_that_the_model_cannot_read_is_refused_with_the_choice_of_rows(tiny_config, monkeypatch):
    config = replace(tiny_config, use_context=True)
    backbone = load_backbone(config)
    backbone.max_context = 4
    monkeypatch.setattr(systems, "load_cutter", lambda _: backbone)
    few, many = (ContextConfig(context_documents=count) for count in (4, 5))
    baseline = replace(tiny_config, use_context=False)

    chosen, _ = choose_systems(config, baseline, few, ["bm25", "cairn/*"], is_whole_table=False)
    assert [system.name for system in chosen][:2] == ["bm25", "cairn/document"]
    assert choose_systems(config, baseline, many, ["bm25"], is_whole_table=False)[0] == chosen[:1]
    with pytest.raises(ConfigError, match="must be at most the model's 4, got 5"):
        choose_systems(config, baseline, many, ["bm25", "cairn/*"], is_whole_table=False)
