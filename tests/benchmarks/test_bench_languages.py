"""Small experiments on several languages: how they are drawn (m³BERT §2.3, stage 2), and its three stages.

``CAIRN_BENCH_LANGUAGES`` names a judged set with the same articles in several languages, whose document ids
are ``language-article-paragraph`` and whose query ids begin with ``language-``. ``CAIRN_BENCH_PAIRS`` names
English pairs and ``CAIRN_BENCH_JUDGED`` an English judged set. Articles from :data:`FIRST_HELD_OUT` on are
read in no language before they are asked for. Figures are means over seeds; intervals are of differences
that are paired by seed, and by query where vectors are ranked.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.lab.evaluate.significance import compare_paired
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder
from cairn.pipeline.lab.train.pretrain import MaskedText, PretrainHeads, vocabulary_of
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.token_stream import TokenStream
from cairn.pipeline.lab.train.trainer import add_gradient, newest_checkpoint
from cairn.pipeline.lab.train.training_files import Texts
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import silent_progress
from safetensors.torch import load_file

from tests.benchmarks.test_bench_pretraining import TOKENS, new_model, over_seeds, run
from tests.benchmarks.test_bench_small_training import given, judged, lines, scores, trained

__all__ = ["judged"]

pytestmark = pytest.mark.bench

FIRST_HELD_OUT, VOCABULARY, FEWEST = 38, 8_192, 16
STEPS, ROWS, SMOOTHINGS, SEEDS = 200, 16, (1.0, 0.7, 0.0), (0, 1, 2, 3)
STAGE_SEEDS, STAGE_STEPS, PAIR_STEPS, BATCH_PAIRS, ENGLISH_TEXTS = (0, 1, 2), 200, 120, 64, 4_000
EXITS: dict[str, Any] = {"matryoshka_layers": (1, 2), "matryoshka_dims": (32, 128)}


@pytest.fixture(scope="module")
def languages() -> RetrievalSet:
    return read_retrieval_set(given("CAIRN_BENCH_LANGUAGES"))


def texts_of(languages: RetrievalSet, *, held_out: bool) -> dict[str, list[str]]:
    """Return by language, in the order of the set, the texts that are held out or the others."""
    found: dict[str, list[str]] = {}
    for doc_id, text in zip(languages.doc_ids, languages.texts, strict=True):
        language, article, _ = re.split("-", doc_id)
        if (int(article) >= FIRST_HELD_OUT) == held_out:
            found.setdefault(language, []).append(text)
    return found


def loss_on(folder: Path, texts: list[str]) -> float:
    """Return the cross entropy of 15 % of the words of all texts, with the bias of the run in ``folder``."""
    checkpoint = read_checkpoint(folder / "model")
    held = Texts(texts=tuple(texts), languages=("",) * len(texts))
    read = PretrainConfig(steps=1, batch_rows=1, max_tokens=TOKENS, heldout_rows=0, precision="fp32")
    num_rows = TokenStream(held, checkpoint, read, silent_progress).num_rows
    read = replace(read, batch_rows=num_rows)
    model, newest = LandmarkEncoder(checkpoint), newest_checkpoint(folder)
    assert newest is not None
    model.objective = heads = PretrainHeads(load_file(newest)["weight/objective.bias"], None)
    task = MaskedText(
        model=model,
        heads=heads,
        stream=TokenStream(held, checkpoint, read, silent_progress),
        vocabulary=vocabulary_of(checkpoint),
        config=read,
        folder=EncoderFolder(base=checkpoint, settings=EncoderConfig()),
    )
    return add_gradient(task.batch(0), model, read)[0]


def test_bench_languages_drawn_by_their_smoothed_share(
    languages: RetrievalSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The language of rank r has an r-th of the paragraphs of the first, English."""
    whole, held_out = (texts_of(languages, held_out=held) for held in (False, True))
    names = ["en", *sorted(whole.keys() - {"en"})]
    kept = {name: whole[name][: max(FEWEST, len(whole[name]) // rank)] for rank, name in enumerate(names, 1)}
    source = lines(
        tmp_path / "texts.jsonl",
        [{"text": text, "language": name} for name, texts in kept.items() for text in texts],
    )
    rare = names[-5:]
    measures = {"all languages": names, "English": ["en"], f"the rarest {', '.join(rare)}": rare}
    losses: dict[tuple[str, float], list[float]] = {}
    every_text = [text for name in names for text in whole[name]]
    for seed in SEEDS:
        base = new_model(tmp_path / f"base{seed}", "m3bert", every_text, seed, vocabulary=VOCABULARY)
        for smoothing in SMOOTHINGS:
            folder = tmp_path / f"{seed}-{smoothing}"
            drawn = {"language_smoothing": smoothing, "steps": STEPS, "batch_rows": ROWS, "heldout_rows": 0}
            run(source, folder, base, seed, **drawn)
            of_language = {name: loss_on(folder, held_out[name]) for name in names}
            for measure, group in measures.items():
                mean = float(np.mean([of_language[name] for name in group]))
                losses.setdefault((measure, smoothing), []).append(mean)
    with capsys.disabled():
        print(
            f"\ncross entropy of unseen articles, {STEPS} steps, seeds {SEEDS}, and against n^1; paragraphs:"
        )
        print(" ", {name: len(texts) for name, texts in kept.items()})
        for (measure, smoothing), of_seeds in losses.items():
            against = over_seeds(of_seeds, losses[measure, 1.0])
            print(f"  {measure}, n^{smoothing}: {np.mean(of_seeds):.3f}  {against}")
    assert all(max(of_seeds) < math.log(VOCABULARY) for of_seeds in losses.values())


def reciprocal_ranks_by_language(folder: Path, languages: RetrievalSet) -> np.ndarray:
    """Return 1 / rank of questions on held-out articles, without English, among texts of their language."""
    encoder = DocumentEncoder(encoder_config({"model": str(folder)}))
    parts = [re.split("-", doc_id) for doc_id in languages.doc_ids]
    found = languages.judgements
    values: list[np.ndarray] = []
    for name in sorted({language for language, *_ in parts} - {"en"}):
        documents = [
            number
            for number, (language, article, _) in enumerate(parts)
            if language == name and int(article) >= FIRST_HELD_OUT
        ]
        asked = np.isin(found.document_J, documents)
        queries = [languages.queries[number] for number in found.query_J[asked].tolist()]
        right_Q = np.searchsorted(documents, found.document_J[asked])
        vectors_NV = encoder.encode([languages.texts[number] for number in documents]).document_vectors_NV
        scores_QN = encoder.encode_queries(queries) @ vectors_NV.T
        values.append(1 / (scores_QN >= scores_QN[np.arange(len(queries)), right_Q][:, None]).sum(1))
    return np.concatenate(values)


def test_bench_three_stages_of_m3bert_against_fewer(
    languages: RetrievalSet, judged: RetrievalSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 3 is the same in all: English pairs. Both ways to pretrain take as many steps."""
    table = pq.read_table(given("CAIRN_BENCH_PAIRS"), columns=["query", "document"])
    records = table.take(np.random.default_rng(0).permutation(len(table))).to_pylist()
    pairs = lines(tmp_path / "pairs.jsonl", records[: PAIR_STEPS * BATCH_PAIRS])
    english = list(dict.fromkeys(r["document"] for r in records))[:ENGLISH_TEXTS]
    foreign = texts_of(languages, held_out=False)
    first = lines(tmp_path / "first.jsonl", [{"text": text} for text in english])
    second = tmp_path / "second.jsonl"
    lines(second, [{"text": t, "language": name} for name, texts in foreign.items() for t in texts])
    every_text = [*english, *itertools.chain.from_iterable(foreign.values())]
    pretrained: dict[str, Any] = {"steps": STAGE_STEPS, "batch_rows": ROWS, "heldout_rows": 0, **EXITS}
    sizes: dict[str, int] = {"vocabulary": VOCABULARY, "num_hidden_layers": 2}
    contrastive: dict[str, Any] = {
        "steps": PAIR_STEPS, "batch_pairs": BATCH_PAIRS, "cluster_pairs": len(records), "margin": math.inf,
        "freeze_embeddings": False, "temperature": 0.05, "peak_lr": 1e-3, "schedule": "cosine", **EXITS,
    }  # fmt: skip
    found: dict[str, dict[str, list[np.ndarray]]] = {"English": {}, "ten other languages": {}}
    for seed in STAGE_SEEDS:
        folder = tmp_path / str(seed)
        new = new_model(folder / "new", "m3bert", every_text, seed, **sizes)
        one = run(first, folder / "1", new, seed, **pretrained)
        bases = {
            "stage 3 alone": new,
            "stages 1 and 3": run(first, folder / "1 again", one, seed + 100, **pretrained),
            "stages 1, 2 and 3": run(second, folder / "2", one, seed, language_smoothing=0.7, **pretrained),
        }
        for name, base in bases.items():
            model = trained([pairs], folder / name, base, seed=seed, **contrastive)
            found["English"].setdefault(name, []).append(scores(model, judged))
            ranks_Q = reciprocal_ranks_by_language(model, languages)
            found["ten other languages"].setdefault(name, []).append(ranks_Q)
    with capsys.disabled():
        for measure, of_arms in found.items():
            print(f"\n{measure}, seeds {STAGE_SEEDS}, against stage 3 alone and against stages 1 and 3")
            means = {name: np.mean(of_seeds, axis=0) for name, of_seeds in of_arms.items()}
            for name, values_Q in means.items():
                others = [compare_paired(values_Q, means[other]) for other in list(means)[:2]]
                told = "".join(f"  {o.difference:+.3f} ({o.low:+.3f} to {o.high:+.3f})" for o in others)
                print(f"  {name}: {values_Q.mean():.3f}{told}")
    assert all(np.mean(of_seeds) > 0 for of_arms in found.values() for of_seeds in of_arms.values())
