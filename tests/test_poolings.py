from __future__ import annotations

from typing import get_args

import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.poolings import POOLING_RULES, POOLINGS, Attention, Pooling, pooling_rule


def test_every_pooling_has_its_rule_and_every_attention_some():
    assert tuple(POOLING_RULES) == get_args(Pooling)
    assert tuple(POOLINGS) == get_args(Attention)
    assert all(rule.attentions for rule in POOLING_RULES.values())


def test_unknown_pooling_is_refused():
    with pytest.raises(ConfigError, match=r"pooling must be one of mean, own, .*, got 'median'"):
        pooling_rule("median")
