from __future__ import annotations

import math
import re
from typing import get_args

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
from cairn.pipeline.poolings import POOLING_RULES, POOLINGS, Attention, Pooling, pooling_rule


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, 0.0099, 100.1])
@pytest.mark.parametrize("name", ["temperature", "query_temperature"])
def test_temperature_out_of_its_range_is_refused(name, temperature):
    with pytest.raises(ConfigError, match=f"^{name} must be a number from 0.01 to 100, got"):
        EncoderConfig(**{name: temperature})
    for within in (0.01, 100, 0.5):
        assert getattr(EncoderConfig(**{name: within}), name) == within


SEED = "must be a whole number from -2,147,483,648 to 2,147,483,647"


@pytest.mark.parametrize(
    ("kind", "name", "value", "sentence"),
    [
        (EncoderConfig, "landmark_interval", "64", "must be a whole number of at least 8, got '64'"),
        (EncoderConfig, "landmark_interval", 7, "must be a whole number of at least 8, got 7"),
        (EncoderConfig, "temperature", "hot", "must be a number from 0.01 to 100, got 'hot'"),
        (EncoderConfig, "causal", "no", "must be true or false, got 'no'"),
        (EncoderConfig, "query_prefix", None, "must be text, got None"),
        (EncoderConfig, "document_prefix", "\udcff", "must be valid Unicode, got '\\udcff' with a lone surr"),
        (EncoderConfig, "pooling", 3, "must be one of"),
        (EncoderConfig, "window_tokens", -5, "must be a whole number of at least 1, got -5 "),
        (CorpusConfig, "id_column", 1, "must be text, got 1"),
        (CorpusConfig, "metadata_columns", "year", "must be a list, each text, got 'year'"),
        (CorpusConfig, "metadata_columns", ("year", 2), "must be a list, each text, got ('year', 2)"),
        (ClusterConfig, "num_clusters", "many", "must be a whole number from 1 to 65,536, got 'many'"),
        (ContextConfig, "seed", None, SEED),
        (ClusterConfig, "seed", 2**31, SEED),
        (IndexConfig, "flat_max_vectors", 1.5, "must be a whole number, got 1.5"),
        (IngestConfig, "sync", "yes", "must be true or false, got 'yes'"),
    ],
    ids=str,
)
def test_setting_of_another_type_or_out_of_bounds_is_refused(kind, name, value, sentence):
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{name} {sentence}')}"):
        kind(**{name: value})


@pytest.mark.parametrize(("window", "overlap"), [(8_192, 128), (512, 128), (256, 128), (255, 127), (128, 64)])
def test_default_overlap_is_at_most_half_the_window(window, overlap):
    assert EncoderConfig(attention="full", window_tokens=window).window_overlap_tokens == overlap
    with pytest.raises(ConfigError, match=r"must lie between 0 and half the window of 128 tokens, got 100"):
        EncoderConfig(attention="full", window_tokens=128, window_overlap_tokens=100)


def test_every_pooling_has_its_rule_and_every_attention_some():
    assert tuple(POOLING_RULES) == get_args(Pooling)
    assert tuple(POOLINGS) == get_args(Attention)
    assert all(rule.attentions for rule in POOLING_RULES.values())
    with pytest.raises(ConfigError, match=r"pooling must be one of mean, own, .*, got 'median'"):
        pooling_rule("median")
