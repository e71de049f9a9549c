from __future__ import annotations

import json
import math

import pytest

from pipeline.config import EncoderConfig, IngestConfig
from pipeline.errors import ConfigError

STEPS = ((128, 0.95), (512, 0.9))


def test_temperature_by_length_read_back_from_json_is_the_same():
    written = IngestConfig(encoder=EncoderConfig(temperature_by_length=STEPS)).to_dict()
    read = json.loads(json.dumps(written))
    assert read == written
    assert EncoderConfig(**read["encoder"]).temperature_by_length == STEPS


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["temperature", "query_temperature"])
def test_temperature_that_is_no_positive_number_is_refused(name, temperature):
    with pytest.raises(ConfigError, match=f"^{name} must be a positive number, got"):
        EncoderConfig(**{name: temperature})


@pytest.mark.parametrize(
    "steps",
    [((512, 0.9), (128, 0.95)), ((128, 0.9), (128, 0.8)), ((0, 0.9),), ((-4, 0.9),), ((128, 0.0),), ((128, math.nan),)],
    ids=["unordered", "repeated", "zero tokens", "negative tokens", "zero", "NaN"],
)
def test_temperature_by_length_that_is_unordered_or_not_positive_is_refused(steps):
    with pytest.raises(ConfigError, match=r"^temperature_by_length must be positive numbers of tokens in ascending order"):
        EncoderConfig(temperature_by_length=steps)
