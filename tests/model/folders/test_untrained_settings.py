"""Settings a model was not trained for are said in one sentence, those it was trained for are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.model.folders.model_defaults import (
    encoder_config,
    settings_warnings,
    untrained_settings_warning,
)


@pytest.mark.parametrize("model", ["cairn-minilm", "all-MiniLM-L6-v2"])
def test_settings_that_a_model_brings_warn_of_nothing(model: str) -> None:
    assert untrained_settings_warning(encoder_config({"model": model})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 4}, "layers 4"),
        ({"use_context": True}, "use_context true"),
        ({"pooling": "lmk"}, "pooling lmk"),
        ({"attention": "full"}, "attention full"),
        ({"dims": 64}, "dims 64"),
        ({"landmark_interval": 32}, "landmark_interval 32"),
        ({"temperature": 0.95}, "temperature 0.95"),
        ({"layers": 3, "use_context": True}, "layers 3, use_context true"),
    ],
    ids=str,
)
def test_setting_the_base_was_not_trained_for_is_named(changes: dict[str, Any], words: str) -> None:
    warning = untrained_settings_warning(EncoderConfig(**changes))
    assert warning is not None
    assert f"was not trained for {words}, which may find less" in warning


def test_window_without_effect_is_said_and_one_that_a_chunk_needs_is_not() -> None:
    (warning,) = settings_warnings(EncoderConfig(window_tokens=256), ContextConfig())
    assert warning.startswith("window_tokens has no effect with attention chunk")
    used = EncoderConfig(window_tokens=1024, landmark_interval=600)
    assert settings_warnings(used, ContextConfig()) == ()


def test_what_cost_nothing_and_a_model_that_is_not_there_warn_of_nothing(tmp_path: Path) -> None:
    assert untrained_settings_warning(EncoderConfig(dims=128)) is None
    assert untrained_settings_warning(EncoderConfig(landmark_interval=48)) is None
    assert untrained_settings_warning(encoder_config({"model": "cairn-minilm", "dims": 64})) is None
    assert settings_warnings(EncoderConfig(model=str(tmp_path / "absent"), layers=4), ContextConfig()) == ()


@pytest.mark.parametrize("settings", [{}, {"model": "https://host/v1#m"}, {"given_dims": 8}])
def test_codes_of_tokens_below_any_that_was_measured_are_warned_about(settings: dict[str, Any]) -> None:
    for token_bytes in (1, 11, 12, 24, 0):
        config = EncoderConfig(**settings, token_bytes=token_bytes)
        told = " ".join(settings_warnings(config, ContextConfig()))
        assert ("the smallest codes that were measured" in told) is (0 < token_bytes < 12)
