"""Settings a model was not trained for are said in one sentence, those it was trained for are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.untrained_settings import (
    MEASURED_LOSSES,
    settings_warnings,
    untrained_settings_warning,
)


@pytest.mark.parametrize("model", ["cairn-minilm", "all-MiniLM-L6-v2"])
def test_settings_that_a_model_brings_warn_of_nothing(model: str) -> None:
    assert untrained_settings_warning(encoder_config({"model": model})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 4}, "layers 4: nDCG@10"),
        ({"use_context": True}, "use_context true"),
        ({"pooling": "lmk"}, "pooling lmk"),
        ({"attention": "full"}, "attention full"),
        ({"dims": 64}, "to 0.686 with dims 64"),
        ({"landmark_interval": 32}, "to 0.815 with landmark_interval 32"),
        ({"layers": 3, "use_context": True}, "layers 3, use_context true: nDCG@10 "),
    ],
    ids=str,
)
def test_setting_the_base_was_not_trained_for_is_named_with_its_measured_loss(
    changes: dict[str, Any], words: str
) -> None:
    warning = untrained_settings_warning(EncoderConfig(**changes))
    assert warning is not None
    assert words in warning
    assert "of SQuAD fell from 0.8" in warning
    assert "\n" not in warning
    assert "with layers 4" not in warning or changes["layers"] == 4


@pytest.mark.parametrize("changes", [{"temperature": 0.95}, {"dims": 32}, {"layers": 3}], ids=str)
def test_value_that_was_not_measured_is_named_without_figures(changes: dict[str, Any]) -> None:
    warning = str(untrained_settings_warning(EncoderConfig(**changes)))
    assert "what it costs was not measured; compare with" in warning
    assert "nDCG" not in warning


def test_figures_of_the_base_model_are_said_to_be_its_own() -> None:
    own = str(untrained_settings_warning(encoder_config({"model": "cairn-minilm", "landmark_interval": 32})))
    assert (
        "cairn-minilm was not trained for landmark_interval 32: what it costs was not measured for it" in own
    )
    assert "of its base model, nDCG@10 of all-MiniLM-L6-v2 on 300 queries of SQuAD fell from 0.819" in own


def test_window_without_effect_is_said_and_one_that_a_chunk_needs_is_not() -> None:
    (warning,) = settings_warnings(EncoderConfig(window_tokens=256), ContextConfig())
    assert warning.startswith("window_tokens has no effect with attention chunk")
    for used in ({"window_tokens": 1024, "landmark_interval": 600}, {"attention": "landmark"}):
        assert settings_warnings(EncoderConfig(**used), ContextConfig()) == ()


def test_sentence_gives_the_loss_at_the_chosen_value() -> None:
    warnings = {value: untrained_settings_warning(EncoderConfig(temperature=value)) for value in (0.9, 0.8)}
    figures = {loss.value: loss.after for loss in MEASURED_LOSSES if loss.setting == "temperature"}
    assert all(f"to {figures[value]:.3f} with" in str(warning) for value, warning in warnings.items())


def test_what_cost_nothing_and_a_model_that_is_not_there_warn_of_nothing(tmp_path: Path) -> None:
    assert untrained_settings_warning(EncoderConfig(dims=128)) is None
    assert untrained_settings_warning(EncoderConfig(landmark_interval=48)) is None
    assert untrained_settings_warning(encoder_config({"model": "cairn-minilm", "dims": 64})) is None
    assert untrained_settings_warning(EncoderConfig(attention="landmark")) is None  # measured: no loss
    assert untrained_settings_warning(EncoderConfig(model=str(tmp_path / "absent"), layers=4)) is None
