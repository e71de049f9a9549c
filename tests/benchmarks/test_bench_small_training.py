"""Small experiments on training, on real text: what a setting gains a model of two layers in some 24 steps.

The base is the first two layers of all-MiniLM-L6-v2, which nothing trained to be a model of their own.
``CAIRN_BENCH_PAIRS`` names pairs with sources, ``CAIRN_BENCH_JUDGED`` the folder of a judged set and
``CAIRN_BENCH_TEXTS`` long texts; without them nothing is measured. ``CAIRN_BENCH_SEED`` (0) draws everything.
Intervals are of the mean paired difference over queries, of one seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.context_ablation import ablate_context
from cairn.pipeline.lab.evaluate.measures import NDCG
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set, sample_set
from cairn.pipeline.lab.evaluate.significance import compare_paired
from cairn.pipeline.lab.evaluate.systems import configured_systems
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.pretrain import pretrain
from cairn.pipeline.lab.train.settings import PretrainConfig, TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.model.folders.names import model_folder

pytestmark = pytest.mark.bench

SEED = int(os.environ.get("CAIRN_BENCH_SEED", "0"))
NUM_PAIRS, NUM_LABELLED, NUM_QUERIES, NUM_DOCUMENTS, STEPS = 2_000, 600, 300, 400, 24
BASE_NAME = "all-MiniLM-L6-v2"
TRAINED: dict[str, Any] = {
    "steps": STEPS, "batch_pairs": 32, "sequence_documents": 1, "max_query_tokens": 24,
    "max_document_tokens": 48, "attention": "chunk", "pooling": "mean", "title_share": 0.0, "peak_lr": 2e-4,
    "distillation_weight": 0.0, "freeze_embeddings": True, "heldout_pairs": 0, "seed": SEED,
}  # fmt: skip
MINED = {"hard_negatives": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "batches without clusters": {"cluster_pairs": NUM_PAIRS},
    "clusters of four batches": {"cluster_pairs": 128},
    "clusters of 100 iterations, the best of 3": {"cluster_iterations": 100, "cluster_attempts": 3},
    "a random tour": {"tour": "random"},
    "false negatives kept": {"margin": math.inf},
    "mined negatives": MINED,
    "mined, whatever their score": {**MINED, "hard_negative_share": 1.0},
    "mined, by a margin of 0.05": {**MINED, "hard_negative_share": 1.0, "hard_negative_margin": 0.05},
    "a cosine schedule": {"schedule": "cosine"},
    "prefixes": {"query_prefix": "search_query: ", "document_prefix": "search_document: "},
    "landmarks of chunks": {"pooling": "lmk"},
    "landmarks of full rows": {"pooling": "lmk", "attention": "full"},
    "latent attention": {"pooling": "latent", "latents": 32},
    "low-rank updates": {"lora_rank": 16},
    "low-rank updates with dropout": {"lora_rank": 16, "lora_dropout": 0.1},
}
INSTRUCTION = "Instruct: find the passage that answers the question Query: "
CONTEXT_DROPOUTS = (0.005, 0.25, 0.0)
READS: dict[str, Any] = {
    "attention": "landmark", "context_documents": 32, "max_context_tokens": 32, "context_absence": 0.0,
}  # fmt: skip
SEEDS = (0, 1)
EXITS: dict[str, dict[str, Any]] = {
    "32 dimensions": {"matryoshka_dims": (32, 384)}, "1 layer": {"matryoshka_layers": (1, 2)},
}  # fmt: skip
Record = dict[str, Any]


def given(variable: str) -> Path:
    """Return the path that a variable names; skip without it."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no data")
    torch.set_num_threads(1)
    return Path(os.environ[variable])


def drawn_rows(columns: list[str]) -> list[Record]:
    """Return pairs in an order drawn from the seed: first those to train on, then those with labels."""
    table = pq.read_table(given("CAIRN_BENCH_PAIRS"), columns=columns)
    order = np.random.default_rng(SEED).permutation(len(table))[: NUM_PAIRS + 2 * NUM_LABELLED]
    return table.take(order).to_pylist()


@pytest.fixture(scope="module")
def drawn() -> list[Record]:
    return drawn_rows(["query", "document", "source"])


@pytest.fixture(scope="module")
def judged() -> RetrievalSet:
    whole = read_retrieval_set(given("CAIRN_BENCH_JUDGED"))
    return sample_set(whole, max_queries=NUM_QUERIES, max_documents=NUM_DOCUMENTS, seed=SEED)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    whole = read_checkpoint(model_folder(BASE_NAME))
    save_encoder_folder(folder, first_layers(whole, 2), EncoderConfig())
    return folder


def lines(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trained(sources: list[Path], folder: Path, base: Path, **settings: Any) -> Path:
    train(sources, folder, TrainConfig(**{**TRAINED, **settings}), base=str(base))
    return folder / "model"


def scores(folder: Path, judged: RetrievalSet, **settings: Any) -> np.ndarray:
    """Return nDCG@10 of every query, by vectors."""
    systems = configured_systems(encoder_config({"model": str(folder), **settings}))
    (result,) = run_bench(judged, systems[:1], context_config(str(folder), {}))
    return result.values[NDCG]


def is_classified(folder: Path, labelled: list[Record]) -> np.ndarray:
    """Say of the second half of texts whether their label has the nearest centroid of the first half."""
    encoder = DocumentEncoder(encoder_config({"model": str(folder)}))
    vectors_NV = encoder.encode_queries([record["query"] for record in labelled])
    names, label_N = np.unique([record["source"] for record in labelled], return_inverse=True)
    half = len(labelled) // 2
    centroids_KV = np.stack(
        [vectors_NV[:half][label_N[:half] == label].sum(0) for label in range(len(names))]
    )
    centroids_KV /= np.maximum(np.linalg.norm(centroids_KV, axis=1, keepdims=True), 1e-9)
    return ((vectors_NV[half:] @ centroids_KV.T).argmax(1) == label_N[half:]).astype(np.float64)


def report(capsys: pytest.CaptureFixture[str], measure: str, found: Mapping[str, np.ndarray]) -> None:
    """Print the means, and of all but the last their paired difference to the last."""
    *_, last = found
    with capsys.disabled():
        print(f"\n{measure}, seed {SEED}")
        for name, values_Q in found.items():
            against = compare_paired(values_Q, found[last])
            difference = f"  {against.difference:+.3f} ({against.low:+.3f} to {against.high:+.3f})"
            print(f"  {name}: {values_Q.mean():.3f}{difference if name != last else ''}")


@pytest.fixture(scope="module")
def pairs(drawn: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", drawn[:NUM_PAIRS])


@pytest.fixture(scope="module")
def plain(pairs: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model trained with the settings that the others change."""
    return trained([pairs], tmp_path_factory.mktemp("plain") / "run", base)


@pytest.fixture(scope="module")
def plain_scores(plain: Path, judged: RetrievalSet) -> np.ndarray:
    return scores(plain, judged)


def test_bench_two_stages_against_one(
    drawn: list[Record],
    pairs: Path,
    judged: RetrievalSet,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    labelled = [{"query": r["query"], "label": r["source"]} for r in drawn[NUM_PAIRS:][:NUM_LABELLED]]
    both = [pairs, lines(tmp_path / "labelled.jsonl", labelled)]
    own: dict[str, Any] = {"negatives": "own", "hard_negatives": 2, "class_negatives": 2}
    batch = {**own, "negatives": "batch"}
    first = trained([pairs], tmp_path / "first", base, **{**batch, "steps": STEPS // 2})
    folders = {
        "one stage, batch": trained(both, tmp_path / "batch", base, **batch),
        "one stage, own negatives": trained(both, tmp_path / "own", base, **own),
        "base": base,
        "two stages": trained(both, tmp_path / "second", first, **{**own, "steps": STEPS // 2}),
    }
    found = {name: scores(folder, judged) for name, folder in folders.items()}
    report(capsys, "nDCG@10", found)
    held_out = drawn[NUM_PAIRS:]
    report(capsys, "accuracy", {name: is_classified(folder, held_out) for name, folder in folders.items()})
    assert found["two stages"].mean() > found["base"].mean()


def test_bench_teacher_against_none(
    pairs: Path, judged: RetrievalSet, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taught: dict[str, Any] = {"teacher": BASE_NAME, "distillation_weight": 2.0}
    folders = {
        "no teacher": trained([pairs], tmp_path / "alone", base),
        "base": base,
        "teacher itself": model_folder(BASE_NAME),
        "teacher": trained([pairs], tmp_path / "taught", base, **taught),
    }
    found = {name: scores(folder, judged) for name, folder in folders.items()}
    report(capsys, "nDCG@10", found)
    assert found["teacher"].mean() > found["base"].mean()


def test_bench_first_stage_of_its_own_against_none(
    pairs: Path, judged: RetrievalSet, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, layers in (("tied", 0), ("untied", 2)):
        folder = trained([pairs], tmp_path / name, base, first_stage_layers=layers, **READS)
        served = context_config(str(folder), {})
        rows = ablate_context(judged, encoder_config({"model": str(folder)}), served, seed=SEED)
        with capsys.disabled():
            print(f"\ntrained {name}, nDCG@10 behind each context, seed {SEED}")
            for row in rows:
                than = row.comparison
                change = f"  {than.difference:+.3f} ({than.low:+.3f} to {than.high:+.3f})" if than else ""
                print(f"  {row.name}: {row.ndcg:.3f}{change}")
        assert rows[0].ndcg > scores(base, judged).mean()


def test_bench_instructions_masked_from_pooling_against_pooled(
    pairs: Path, judged: RetrievalSet, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one instruction stands before queries, in training and when they are asked."""
    pooled = tmp_path / "pooled"
    pools = EncoderConfig(pooling="mean", attention="chunk", query_prefix=INSTRUCTION, pool_prefix=True)
    save_encoder_folder(pooled, read_checkpoint(base), pools)
    arms: dict[str, tuple[Path, dict[str, Any]]] = {
        "no instruction": (base, {}),
        "masked": (base, {"query_prefix": INSTRUCTION}),
        "pooled": (pooled, {}),
    }
    found = {"no instruction, base": scores(base, judged), "pooled, base": scores(pooled, judged)}
    found["masked, base"] = scores(base, judged, query_prefix=INSTRUCTION)
    for name, (own_base, settings) in arms.items():
        folders = [
            trained([pairs], tmp_path / name / str(seed), own_base, **settings, seed=seed) for seed in SEEDS
        ]
        assert [encoder_config({"model": str(folder)}).pool_prefix for folder in folders] == [
            name == "pooled"
        ] * len(folders)
        found[name] = np.mean([scores(folder, judged) for folder in folders], axis=0)
    report(capsys, "nDCG@10", found)
    assert found["masked"].mean() > found["no instruction, base"].mean()


def test_bench_context_dropout_against_none(
    pairs: Path, judged: RetrievalSet, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model is served behind a context as in training, and without one."""
    served: dict[str, dict[float, list[np.ndarray]]] = {}
    for share in CONTEXT_DROPOUTS:
        for seed in SEEDS:
            folder = trained(
                [pairs], tmp_path / f"{share}-{seed}", base, context_dropout=share, seed=seed, **READS
            )
            found = {
                "the context of training": scores(folder, judged),
                "without a context": scores(folder, judged, use_context=False),
            }
            for name, values_Q in found.items():
                served.setdefault(name, {}).setdefault(share, []).append(values_Q)
    for name, of_shares in served.items():
        means = {str(share): np.mean(of_seeds, axis=0) for share, of_seeds in of_shares.items()}
        report(capsys, f"nDCG@10, {name}, by share that is dropped", means)
    assert all(np.mean(of_seeds) > 0 for of_shares in served.values() for of_seeds in of_shares.values())


def test_bench_retromae_before_training_against_none(
    pairs: Path, judged: RetrievalSet, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of the judged set should be long."""
    texts = pq.read_table(given("CAIRN_BENCH_TEXTS"), columns=["text"]).column("text").to_pylist()
    order = np.random.default_rng(SEED).permutation(len(texts))[:200]
    source = lines(tmp_path / "texts.jsonl", [{"text": texts[place][:8_000]} for place in order])
    config: dict[str, Any] = {
        "batch_rows": 4, "max_tokens": 256, "landmark_intervals": (32, 64, 128), "peak_lr": 1e-4,
        "heldout_rows": 0, "seed": SEED,
    }  # fmt: skip
    found: dict[str, np.ndarray] = {}
    objectives = {
        "none": {"steps": 1, "peak_lr": 1e-12}, "masked words": {"steps": STEPS, "mask_share": 0.3},
        "RetroMAE": {"steps": STEPS, "objective": "retromae"},
    }  # fmt: skip
    for name, own in objectives.items():
        pretrain([source], tmp_path / name, PretrainConfig(**{**config, **own}), base=str(base))
        folder = trained([pairs], tmp_path / f"{name} after", tmp_path / name / "model", pooling="lmk")
        found[name] = scores(folder, judged)
    report(capsys, "nDCG@10 after training", found)
    losses = [r["loss"] for r in read_log(tmp_path / "RetroMAE" / "log.jsonl") if "loss" in r]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_bench_one_setting_changed(
    name: str,
    pairs: Path,
    judged: RetrievalSet,
    base: Path,
    plain_scores: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = scores(trained([pairs], tmp_path / "run", base, **VARIANTS[name]), judged)
    report(capsys, "nDCG@10", {name: changed, "as it was": plain_scores})
    assert changed.mean() > 0.5 * plain_scores.mean()


@pytest.mark.parametrize("name", EXITS)
def test_bench_exits_trained_against_not(
    name: str, pairs: Path, judged: RetrievalSet, base: Path, plain: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = trained([pairs], tmp_path / "run", base, **EXITS[name])
    read = {"dims": 32} if name == "32 dimensions" else {"layers": 1}
    own, other = scores(folder, judged, **read), scores(plain, judged, **read)
    report(capsys, f"nDCG@10, {name}", {"trained": own, "not": other})
    whole = {"trained": scores(folder, judged), "not": scores(plain, judged)}
    report(capsys, "the whole vector", whole)
    assert own.mean() > 0.5 * other.mean()
