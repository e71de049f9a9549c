"""Compare the cost of 512 context vectors before a text with that of 512 more tokens, for each backbone.

The passes of a backbone are timed in turn, so that load on the machine affects all of them. Weights are
random, since the time does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone

pytestmark = pytest.mark.bench

CONTEXT = TEXT = 512
ROUNDS = 15
MOST = 1.05
"""Of the time of as many tokens: what the clock may add on a machine that is not quiet."""

BACKBONES = ["bert", "nomic_bert", "modernbert", "cde-small-v1-like", "cde-small-v2-like"]


@pytest.fixture(scope="module")
def load(
    make_bert: Callable[..., Path], make_cde: Callable[..., Path], model_size: Any
) -> Callable[[str], Any]:
    """Return a loader of six layers of 384 dimensions, as all-MiniLM-L6-v2 has them.

    A family is the first stage of its CDE.
    """

    def load(name: str) -> Any:
        size = model_size(
            width=384, heads=12, inner=1536 if name == "bert" else 1024, positions=2048, layers=6, window=128
        )
        if name == "bert":
            return load_backbone(EncoderConfig(model=str(make_bert(size))))
        version = 1 if name in ("nomic_bert", "cde-small-v1-like") else 2
        folder = make_cde(version, size=size, transductive_corpus_size=CONTEXT, max_seq_length=TEXT + CONTEXT)
        backbone = load_backbone(EncoderConfig(model=str(folder)))
        return backbone if name.startswith("cde") else backbone.first_stage._backbone

    return load


@pytest.mark.parametrize("name", BACKBONES)
def test_bench_context_vectors_cost_no_more_than_tokens(name: str, load: Callable[[str], Any]) -> None:
    backbone = load(name)
    generator = np.random.default_rng(0)
    ids = generator.integers(5, 60, (1, TEXT + CONTEXT))
    context = generator.normal(size=(CONTEXT, backbone.context_dim)).astype(np.float32)

    def behind_context() -> None:
        backbone.hidden_states(ids[:, :TEXT], np.array([TEXT]), context)

    def longer() -> None:
        backbone.hidden_states(ids, np.array([TEXT + CONTEXT]), None)

    def alone() -> None:
        backbone.hidden_states(ids[:, :TEXT], np.array([TEXT]), None)

    seconds: dict[Callable[[], None], list[float]] = {behind_context: [], longer: [], alone: []}
    for each in seconds:
        each()
    for _ in range(ROUNDS):
        for each, times in seconds.items():
            times.append(_timed(each))
    ratios = sorted(
        with_context / tokens
        for with_context, tokens in zip(seconds[behind_context], seconds[longer], strict=True)
    )
    ratio = statistics.median(ratios)
    times = {each.__name__: 1e3 * statistics.median(values) for each, values in seconds.items()}
    print(
        f"\n{name}: {torch.get_num_threads()} thread(s), {TEXT} tokens alone {times['alone']:.0f} ms, ",
        end="",
    )
    print(
        f"with {CONTEXT} context vectors {times['behind_context']:.0f} ms, with {CONTEXT} more tokens "
        f"{times['longer']:.0f} ms"
    )
    print(f"ratio = {ratio:.2f}  (rounds {ratios[0]:.2f} to {ratios[-1]:.2f}; goal <= 1)")
    assert ratio <= MOST


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
