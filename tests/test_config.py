from __future__ import annotations

import json
import math

import pytest
from cairn.pipeline.config import (
    ClusterConfig,
    ContextConfig,
    CorpusConfig,
    EncoderConfig,
    IndexConfig,
    IngestConfig,
)
from cairn.pipeline.errors import ConfigError

STEPS = ((128, 0.95), (512, 0.9))


def test_temperature_by_length_read_back_from_json_is_the_same():
    written = IngestConfig(encoder=EncoderConfig(temperature_by_length=STEPS)).to_dict()
    read = json.loads(json.dumps(written))
    assert read == written
    assert EncoderConfig(**read["encoder"]).temperature_by_length == STEPS


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, 1e-300, 0.0099, 100.1, 1e30])
@pytest.mark.parametrize("name", ["temperature", "query_temperature"])
def test_temperature_out_of_its_range_is_refused(name, temperature):
    with pytest.raises(ConfigError, match=f"^{name} must be a number from 0.01 to 100, got"):
        EncoderConfig(**{name: temperature})


@pytest.mark.parametrize(
    "steps",
    [
        ((512, 0.9), (128, 0.95)),
        ((128, 0.9), (128, 0.8)),
        ((0, 0.9),),
        ((-4, 0.9),),
        ((128, 0.0),),
        ((128, math.nan),),
        ((128, 1e30),),
    ],
    ids=["unordered", "repeated", "zero tokens", "negative tokens", "zero", "NaN", "huge"],
)
def test_temperature_by_length_that_is_unordered_or_not_positive_is_refused(steps):
    with pytest.raises(
        ConfigError, match=r"^temperature_by_length must be positive numbers of tokens in ascending order"
    ):
        EncoderConfig(temperature_by_length=steps)


@pytest.mark.parametrize("temperature", [0.01, 100, 0.5])
def test_temperature_within_its_range_is_taken(temperature):
    assert EncoderConfig(temperature=temperature, query_temperature=temperature).temperature == temperature


@pytest.mark.parametrize("name", ["query_prefix", "document_prefix"])
def test_prefix_that_is_not_valid_unicode_is_refused(name):
    with pytest.raises(
        ConfigError, match=rf"^{name} must be valid Unicode, got '\\udcff' with a lone surrogate"
    ):
        EncoderConfig(**{name: "\udcff"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"landmark_interval": "64"}, "landmark_interval must be a whole number of at least 8, got '64'"),
        ({"landmark_interval": True}, "landmark_interval must be a whole number of at least 8, got True"),
        ({"landmark_interval": 64.5}, "landmark_interval must be a whole number of at least 8, got 64.5"),
        ({"landmark_interval": None}, "landmark_interval must be a whole number of at least 8, got None"),
        ({"temperature": "hot"}, "temperature must be a number from 0.01 to 100, got 'hot'"),
        ({"query_temperature": "1"}, "query_temperature must be a number from 0.01 to 100, got '1'"),
        ({"causal": "no"}, "causal must be true or false, got 'no'"),
        ({"query_prefix": None}, "query_prefix must be text, got None"),
        ({"dims": "8"}, "dims must be a whole number of at least 1, got '8'"),
        ({"pooling": 3}, "pooling must be one of"),
        ({"temperature_by_length": 5}, "temperature_by_length must be pairs"),
        ({"temperature_by_length": ((128, "warm"),)}, "temperature_by_length must be pairs"),
        ({"temperature_by_length": ((True, 0.9),)}, "temperature_by_length must be pairs"),
    ],
    ids=str,
)
def test_setting_of_another_type_is_refused(changes, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        EncoderConfig(**changes)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (CorpusConfig, {"id_column": 1}, "id_column must be text, got 1"),
        (
            CorpusConfig,
            {"metadata_columns": "year"},
            "metadata_columns must be a list, each text, got 'year'",
        ),
        (
            CorpusConfig,
            {"metadata_columns": ("year", 2)},
            r"metadata_columns must be a list, each text, got \('year', 2\)",
        ),
        (
            ClusterConfig,
            {"num_clusters": "many"},
            "num_clusters must be a whole number from 1 to 65,536, got 'many'",
        ),
        (
            ContextConfig,
            {"seed": None},
            "seed must be a whole number from -2,147,483,648 to 2,147,483,647",
        ),
        (ClusterConfig, {"num_redos": 0}, "num_redos must be a whole number of at least 1, got 0"),
        (ClusterConfig, {"seed": 2**31}, "seed must be a whole number from -2,147,483,648 to 2,147,483,647"),
        (IndexConfig, {"flat_max_vectors": 1.5}, "flat_max_vectors must be a whole number, got 1.5"),
        (IngestConfig, {"sync": "yes"}, "sync must be true or false, got 'yes'"),
    ],
    ids=str,
)
def test_setting_of_another_type_is_refused_by_every_stage(kind, changes, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        kind(**changes)


def test_negative_window_is_blamed_on_the_window():
    with pytest.raises(ConfigError, match=r"^window_tokens must be a whole number of at least 0, got -5 "):
        EncoderConfig(window_tokens=-5)


@pytest.mark.parametrize(("window", "overlap"), [(8_192, 128), (512, 128), (256, 128), (255, 127), (128, 64)])
def test_default_overlap_is_at_most_half_the_window(window, overlap):
    assert EncoderConfig(attention="full", window_tokens=window).window_overlap_tokens == overlap


def test_overlap_of_more_than_half_the_window_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^window_overlap_tokens must lie between 0 and half the window of 128 tokens, got 100",
    ):
        EncoderConfig(attention="full", window_tokens=128, window_overlap_tokens=100)
