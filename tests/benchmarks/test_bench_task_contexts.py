"""Tasks without a corpus behind a context (CDE §6): classes, clusters and pairs of the same topic.

``CAIRN_BENCH_JUDGED`` names a judged set of passages whose title is their topic. Each task holds the first
sentences of passages of some topics, drawn anew; all systems have the same tasks. Intervals are Student's, of
differences that are paired by task. Draws share topics, so the intervals are somewhat too narrow.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.lab.evaluate.mteb_search import MtebModel
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.lab.evaluate.systems import our_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.benchmarks.test_bench_small_training import given
from tests.lab.evaluate.test_mteb_tasks import scores_of

pytestmark = pytest.mark.bench

NUM_DRAWS, NUM_TOPICS, PER_TOPIC, T_975 = 12, 6, 20, 2.201
KINDS = ("Classification", "Clustering", "PairClassification")
CONTEXTS = ("corpus", "random", "none")
SETTINGS: dict[str, dict[str, Any]] = {"as it is": {}, "whitened": {"whitening": 0.3}}


@pytest.fixture(scope="module")
def passages() -> RetrievalSet:
    return read_retrieval_set(given("CAIRN_BENCH_JUDGED"))


def drawn_tasks(passages: RetrievalSet, generator: np.random.Generator) -> dict[str, Any]:
    """Return texts with their topics in random order, and as many of the same topics to learn from."""
    topics = sorted(set(passages.titles))
    rows: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    for label, number in enumerate(generator.choice(len(topics), NUM_TOPICS, replace=False).tolist()):
        of_topic = [
            t for t, title in zip(passages.texts, passages.titles, strict=True) if title == topics[number]
        ]
        first = [re.split(r"(?<=[.!?])\s", text)[0] for text in of_topic]
        chosen = generator.permutation(len(first))[:PER_TOPIC].tolist()
        own = [{"text": first[place], "label": label} for place in chosen]
        rows += own[: PER_TOPIC // 2]
        train += own[PER_TOPIC // 2 :]
    order = generator.permutation(len(rows)).tolist()
    return {
        "texts": [rows[place]["text"] for place in order],
        "labels": [rows[place]["label"] for place in order],
        "train": train,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS)
def test_bench_tasks_behind_a_context_against_none(
    setting: str, passages: RetrievalSet, capsys: pytest.CaptureFixture[str]
) -> None:
    config = encoder_config(SETTINGS[setting])
    systems = {system.name: system for system in our_systems(config)}
    generator = np.random.default_rng(0)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(NUM_DRAWS):
        data = drawn_tasks(passages, generator)
        for context in CONTEXTS:
            for kind in KINDS:
                model = MtebModel(systems[f"mean/{context}/document"], ContextConfig())
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    score = scores_of(model, kind, **data)["main_score"]
                found.setdefault((kind, context), []).append(score)
    with capsys.disabled():
        print(f"\n{NUM_DRAWS} tasks of {NUM_TOPICS} topics, {setting}; against the corpus's context")
        for (kind, context), scores in found.items():
            difference = np.array(found[kind, "corpus"]) - scores
            mean, half = difference.mean(), T_975 * difference.std(ddof=1) / np.sqrt(NUM_DRAWS)
            told = f"  it gains {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
            print(f"  {kind}, {context}: {np.mean(scores):.3f}{told if context != 'corpus' else ''}")
    assert all(0 <= score <= 1 for scores in found.values() for score in scores)
