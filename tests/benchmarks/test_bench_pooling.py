"""Landmarks, means and [CLS] as texts grow (LMK §3, §5): the same budget of training, the same questions.

The base is the first two layers of all-MiniLM-L6-v2, trained on openings of 64 tokens.
``CAIRN_BENCH_PAIRS`` names pairs, ``CAIRN_BENCH_JUDGED`` a judged set of long documents with evidence. Its
documents are cut into pieces of one length, and as many of these as were drawn are searched, each by one
question whose evidence begins in it. So length and pooling differ, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.lab.evaluate.significance import compare_paired
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.benchmarks.test_bench_small_training import SEED, base, drawn, given, pairs, trained

__all__ = ["base", "drawn", "pairs"]

pytestmark = pytest.mark.bench

NUM_PIECES, STEPS, CHARACTERS = 150, 96, {128: 570, 256: 1_150, 480: 2_150}
"""Pieces of each length, steps, and characters of so many tokens, less than the window of 510."""
FULL: dict[str, Any] = {"attention": "full"}
MODELS: dict[str, dict[str, Any]] = {
    "mean": {**FULL, "pooling": "mean"},
    "lmk": {**FULL, "pooling": "lmk"},
    "lmk of 64": {**FULL, "pooling": "lmk", "landmark_intervals": (64,)},
    "cls": {"attention": "chunk", "pooling": "cls", "landmark_intervals": (510,)},
}


def pieces_of(judged: RetrievalSet, characters: int) -> tuple[list[str], list[str], np.ndarray]:
    """Return texts, a question of each, and where in its text the evidence begins, from 0 to 1."""
    found = judged.judgements
    asked: dict[tuple[int, int], tuple[int, float]] = {}
    for place in np.random.default_rng(SEED).permutation(len(found.start_J)).tolist():
        number, offset = divmod(int(found.start_J[place]), characters)
        key = (int(found.document_J[place]), number)
        asked.setdefault(key, (int(found.query_J[place]), offset / characters))
    chosen = list(asked)[:NUM_PIECES]
    texts = [judged.texts[doc][number * characters : (number + 1) * characters] for doc, number in chosen]
    questions = [judged.queries[asked[key][0]] for key in chosen]
    return texts, questions, np.array([asked[key][1] for key in chosen])


def reciprocal_ranks(folder: Path, texts: list[str], questions: list[str], **settings: Any) -> np.ndarray:
    encoder = DocumentEncoder(encoder_config({"model": str(folder), **settings}))
    scores_QN = encoder.encode_queries(questions) @ encoder.encode(texts).document_vectors_NV.T
    return 1 / (scores_QN >= np.diag(scores_QN)[:, None]).sum(1)


def test_bench_poolings_by_length_of_text(
    pairs: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = read_retrieval_set(given("CAIRN_BENCH_JUDGED"))
    short: dict[str, Any] = {"steps": STEPS, "max_document_tokens": 64, "peak_lr": 5e-4}
    folders = {
        name: trained([pairs], tmp_path / name, base, **short, **settings)
        for name, settings in MODELS.items()
    }
    found: dict[tuple[str, int], np.ndarray] = {}
    lines = [f"\nreciprocal rank among {NUM_PIECES} pieces, {STEPS} steps, seed {SEED}"]
    for tokens, characters in CHARACTERS.items():
        texts, questions, place_Q = pieces_of(judged, characters)
        for name, folder in folders.items():
            found[name, tokens] = value_Q = reciprocal_ranks(folder, texts, questions)
            than = compare_paired(value_Q, found["mean", tokens])
            halves = [value_Q[place_Q < 0.5].mean(), value_Q[place_Q >= 0.5].mean()]
            lines.append(
                f"  {tokens} tokens, {name}: {value_Q.mean():.3f}, evidence in the first half "
                f"{halves[0]:.3f}, in the second {halves[1]:.3f}; against mean "
                f"{than.difference:+.3f} ({than.low:+.3f} to {than.high:+.3f})"
            )
    texts, questions, _ = pieces_of(judged, CHARACTERS[480])
    for interval in (32, 128, 256):
        served = {
            name: reciprocal_ranks(folders[name], texts, questions, landmark_interval=interval)
            for name in ("lmk", "lmk of 64")
        }
        than = compare_paired(served["lmk"], served["lmk of 64"])
        lines.append(
            f"  480 tokens, interval {interval}: drawn {served['lmk'].mean():.3f}, fixed "
            f"{served['lmk of 64'].mean():.3f}; {than.difference:+.3f} ({than.low:+.3f} to {than.high:+.3f})"
        )
    with capsys.disabled():
        print("\n".join(lines))
    assert found["mean", 128].mean() > 5 / NUM_PIECES
