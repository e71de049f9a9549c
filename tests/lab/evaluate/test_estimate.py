from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate import estimate
from cairn.pipeline.lab.evaluate.estimate import estimate_seconds
from cairn.pipeline.lab.evaluate.known_items import known_items_of
from cairn.pipeline.lab.evaluate.systems import configured_systems


def test_estimate_counts_every_encoding_over_all_texts(
    monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    texts = [f"the cat sat on the mat number {each}. {'the old river walks. ' * 20}" for each in range(8)]
    judged = known_items_of("walks", [*"abcdefgh"], [""] * 8, texts, 2, 0, {})
    ticks = iter(range(100))
    monkeypatch.setattr(estimate.time, "monotonic", lambda: float(next(ticks)))  # the sample takes a second
    monkeypatch.setattr(estimate, "SAMPLE_CHARACTERS", len(judged.texts[0]))
    config = EncoderConfig(model=str(tiny_model_folder), landmark_interval=8, use_context=False)
    other = replace(config, landmark_interval=16)

    one = estimate_seconds([judged], configured_systems(config))
    both = estimate_seconds([judged, judged], [*configured_systems(config), *configured_systems(other)])

    share = sum(map(len, judged.texts)) / len(judged.texts[0])
    assert (one.seconds, one.encodings) == (pytest.approx(share), 1)
    assert (both.seconds, both.encodings) == (pytest.approx(4 * share), 2)
    assert both.tokens == pytest.approx(2 * one.tokens, abs=1)
