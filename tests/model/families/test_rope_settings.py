from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.rotary import read_rotary
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

PAIRS, DIM = 16, 32


def _checkpoint(**config):
    return Checkpoint(
        folder=Path(),
        config=config,
        tensors={},
        tokenizer=Tokenizer(WordLevel()),
        cls_id=None,
        landmark_id=0,
        pad_id=0,
        weights_sha256="",
        fingerprint="",
    )


def _frequencies(**config):
    """Return the angles of position 1."""
    cos_1E, sin_1E = _table(**config).at(torch.tensor([1]))
    return torch.atan2(sin_1E, cos_1E)[0].tolist()


def _table(**config):
    return read_rotary(_checkpoint(**config), DIM, 2, torch.device("cpu"))


def _llama3(frequency, factor, low, high, trained):
    """By the three cases of Llama 3.1, on wavelengths."""
    wave = 2 * math.pi / frequency
    if wave < trained / high:
        return frequency
    if wave > trained / low:
        return frequency / factor
    smooth = (trained / wave - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


A = math.log(8) / (DIM / 2) ** 0.625
FIXED = {"rope_theta": 20_000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}


@pytest.mark.parametrize(
    ("config", "frequency", "longest_is_divided_by"),
    [
        ({"rope_theta": 500.0}, lambda pair: 500.0 ** (-2 * pair / DIM), 1),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}},
            lambda pair: 1e4 ** (-2 * pair / DIM) / 4,
            4,
        ),
        (FIXED, lambda pair: (20_000.0 * 8) ** (-2 * pair / DIM) / 8 ** (2 / DIM), 8),
        (
            {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.625}},
            lambda pair: 1e4 ** (-2 * pair / DIM) / math.exp(A * (pair + 1) ** 0.625),
            8,
        ),
    ],
    ids=["plain", "linear", "fixed ntk", "mixed ntk"],
)
def test_frequencies_equal_the_formula_and_stretch_the_longest_wave(config, frequency, longest_is_divided_by):
    found = _frequencies(**config)
    assert found == pytest.approx([frequency(pair) for pair in range(PAIRS)])
    plain = config.get("rope_theta", 1e4) ** (-2 * (PAIRS - 1) / DIM)
    assert found[-1] == pytest.approx(plain / longest_is_divided_by)


def test_llama3_frequencies_equal_the_three_cases():
    settings = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    expected = [_llama3(1e4 ** (-2 * pair / DIM), 8.0, 1.0, 4.0, 256) for pair in range(PAIRS)]
    ours = _frequencies(rope_scaling={"rope_type": "llama3", **settings})
    assert ours == pytest.approx(expected, rel=1e-5)
    plain = [1e4 ** (-2 * pair / DIM) for pair in range(PAIRS)]
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    assert ratios[0] == pytest.approx(1)
    assert ratios[-1] == pytest.approx(1 / 8)
    assert any(0.13 < ratio < 0.99 for ratio in ratios)


def test_todays_names_win_over_the_older_ones():
    newer = {"rope_type": "default", "rope_theta": 700.0}
    assert _frequencies(rope_theta=1.5, rope_parameters=newer) == _frequencies(rope_theta=700.0)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "got 'longrope' over 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": 9},
            "low_freq_factor .* got None",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "original_max_position_embeddings .* got None",
        ),
        ({"rope_parameters": [1]}, "rope_parameters of the model must hold settings by name"),
        ({"rope_theta": -1}, "must give rope_theta as a positive number, got -1"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "must be a positive number, got True"),
    ],
)
def test_settings_that_are_not_built_or_damaged_are_refused(config, sentence):
    with pytest.raises(ModelError, match=sentence):
        _table(**config)
