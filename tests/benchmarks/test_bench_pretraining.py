"""Small experiments on pretraining: the claims of m³BERT and of RetroMAE with landmarks, and bases of rotary
positions on texts longer than those of training, on Python's documentation.

A model of 4 layers of 128 dimensions and a vocabulary of 4,096, made of the same text, with one thread.
Seconds of training show a direction at most. Figures are means over seeds. RetroMAE has a bootstrap interval
of its paired difference over queries, shares of masked words a t interval of theirs over seeds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.sample import write_sample
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train.pretrain import new_checkpoint, pretrain
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

pytestmark = pytest.mark.bench

SEEDS, STEPS, ROWS, TOKENS = (0, 1), 40, 8, 128
LAYERS, WIDTHS = (2, 4), (16, 32, 128)
NUM_DOCUMENTS, DOCUMENT_CHARACTERS, QUERY_CHARACTERS = 100, 4_000, 200
ROTARY_BASES, ROTARY_STEPS, LENGTHS = (1_000, 10_000, 1_000_000), 80, (512, 2_048, 8_192)
MASK_SHARES, MASK_SEEDS, MASK_STEPS = (0.05, 0.15, 0.3, 0.6), (0, 1, 2, 3), 200
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Of Student's distribution, by the number of seeds."""
HELD_OUT_TOKENS, MIN_LONG_CHARACTERS = 16_384, 25_000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 344,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the documents of the sample corpus."""
    folder = tmp_path_factory.mktemp("sample")
    write_sample(folder)
    torch.set_num_threads(1)
    return [
        text
        for path in sorted(folder.glob("*.parquet"))
        for text in pq.read_table(path, columns=["text"]).column("text").to_pylist()
    ]


@pytest.fixture(scope="module")
def source(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def new_model(
    folder: Path, model_type: str, texts: list[str], seed: int, vocabulary: int = 4_096, **sizes: Any
) -> Path:
    """Write new weights behind a tokenizer made of the texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    )
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    like = replace(
        read_checkpoint(model_folder("all-MiniLM-L6-v2")),
        folder=folder / "tokenizer", tokenizer=tokenizer, cls_id=2, landmark_id=3, pad_id=0,
    )  # fmt: skip
    checkpoint = new_checkpoint({"model_type": model_type, **SIZES, **sizes}, like, seed=seed)
    save_encoder_folder(folder / "model", checkpoint, EncoderConfig())
    return folder / "model"


def run(source: Path, folder: Path, base: Path, seed: int, **settings: Any) -> Path:
    config: dict[str, Any] = {
        "steps": STEPS, "batch_rows": ROWS, "max_tokens": TOKENS, "heldout_rows": 32, "peak_lr": 2e-3,
        "evaluate_every": STEPS, "checkpoint_every": STEPS, "precision": "fp32", "seed": seed,
    }  # fmt: skip
    pretrain([source], folder, PretrainConfig(**{**config, **settings}), base=str(base))
    return folder / "model"


def exits_of(folder: Path, step: int) -> dict[str, float]:
    """Return the held-out cross entropy by layer and width."""
    record = next(r for r in read_log(folder / "log.jsonl") if "heldout_terms" in r and r["step"] == step)
    return {name: value for name, value in record["heldout_terms"].items() if "/" in name}


def over_seeds(a_S: list[float], b_S: list[float]) -> str:
    """Return the mean of a - b and its 95 % t interval, paired by seed."""
    difference_S = np.array(a_S) - np.array(b_S)
    error = difference_S.std(ddof=1) / np.sqrt(len(a_S))
    half = error * T_975[len(a_S)]
    mean = difference_S.mean()
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def test_bench_m3bert_exits_of_joint_pretraining_against_those_of_the_last_alone(
    texts: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, list[Mapping[str, float]]] = {"joint": [], "distilled": [], "last alone": []}
    exits: dict[str, Any] = {"matryoshka_layers": LAYERS, "matryoshka_dims": WIDTHS}
    for seed in SEEDS:
        base = new_model(tmp_path / f"base{seed}", "m3bert", texts, seed)
        run(source, tmp_path / f"joint{seed}", base, seed, **exits)
        found["joint"].append(exits_of(tmp_path / f"joint{seed}", STEPS))
        run(source, tmp_path / f"distilled{seed}", base, seed, distillation_weight=1.0, **exits)
        found["distilled"].append(exits_of(tmp_path / f"distilled{seed}", STEPS))
        plain = run(source, tmp_path / f"plain{seed}", base, seed)
        run(source, tmp_path / f"again{seed}", plain, seed, steps=1, evaluate_every=1, **exits)
        found["last alone"].append(exits_of(tmp_path / f"again{seed}", 0))
    lines = [
        f"{name:10} " + "  ".join(
            f"{layer}/{width} {np.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for layer, width in itertools.product(LAYERS, WIDTHS)
            for values in [[terms[f"mlm/{layer}/{width}"] for terms in of_seeds]]
        )
        for name, of_seeds in found.items()
    ]  # fmt: skip
    with capsys.disabled():
        print("\nheld-out cross entropy by layer/width, mean (range over seeds)", *lines, sep="\n")
    smallest = f"mlm/{LAYERS[0]}/{WIDTHS[0]}"
    pairs = zip(found["joint"], found["last alone"], strict=True)
    assert all(joint[smallest] < alone[smallest] for joint, alone in pairs)


def test_bench_layers_of_m3bert_against_those_of_bert(
    texts: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many parameters: BERT's feed-forward has two matrices, m³BERT's three."""
    last = f"mlm/{LAYERS[-1]}/{WIDTHS[-1]}"
    found: dict[str, list[float]] = {}
    for (model_type, width), seed in itertools.product((("m3bert", 344), ("bert", 516)), SEEDS):
        folder = tmp_path / f"{model_type}{seed}"
        base = new_model(folder / "base", model_type, texts, seed, intermediate_size=width)
        run(source, folder / "run", base, seed)
        found.setdefault(model_type, []).append(exits_of(folder / "run", STEPS)[last])
    with capsys.disabled():
        print("\nheld-out cross entropy, by seed:", found)
    assert max(max(of_seeds) for of_seeds in found.values()) < np.log(4_096)


def test_bench_shares_of_masked_words(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are asked for 15 % of the words of the same unseen texts."""
    for name, kept in (("seen", [t for n, t in enumerate(texts) if n % 4]), ("unseen", texts[::4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    losses: dict[float, list[float]] = {}
    bases = [new_model(tmp_path / f"base{seed}", "bert", texts, seed) for seed in MASK_SEEDS]
    for (seed, base), share in itertools.product(zip(MASK_SEEDS, bases, strict=True), MASK_SHARES):
        folder = tmp_path / f"{seed}-{share}"
        steps = {"steps": MASK_STEPS, "heldout_rows": 0, "mask_share": share}
        trained = run(tmp_path / "seen.jsonl", folder / "run", base, seed, **steps)
        read = {"steps": 1, "evaluate_every": 1, "heldout_rows": HELD_OUT_TOKENS // TOKENS}
        run(tmp_path / "unseen.jsonl", folder / "again", trained, 0, **read)
        records = read_log(folder / "again" / "log.jsonl")
        losses.setdefault(share, []).append(next(r["heldout_loss"] for r in records if r["step"] == 0))
    with capsys.disabled():
        print(f"\nheld-out cross entropy after {MASK_STEPS} steps, seeds {MASK_SEEDS}, and against 0.15")
        for share, of_seeds in losses.items():
            print(f"  {share}: {np.mean(of_seeds):.3f}  {over_seeds(of_seeds, losses[0.15])}")
    assert all(max(of_seeds) < np.log(4_096) for of_seeds in losses.values())


def ranks_of(folder: Path, documents: list[str], queries: list[str]) -> np.ndarray:
    """Return the rank of each query's document, by the mean of a document's landmarks."""
    config = encoder_config({"model": str(folder), "window_tokens": TOKENS, "window_overlap_tokens": 0})
    encoder = DocumentEncoder(replace(config, precision="fp32", landmark_interval=32))
    scores_QN = encoder.encode_queries(queries) @ encoder.encode(documents).document_vectors_NV.T
    return 1 + (scores_QN > np.diag(scores_QN)[:, None]).sum(1)


def test_bench_retromae_with_landmarks_against_masked_words_and_no_pretraining(
    texts: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [text[:DOCUMENT_CHARACTERS] for text in texts if len(text) >= DOCUMENT_CHARACTERS][:NUM_DOCUMENTS]
    start = DOCUMENT_CHARACTERS // 2
    queries = [text[start : start + QUERY_CHARACTERS] for text in long]
    documents = [text[:start] + text[start + QUERY_CHARACTERS :] for text in long]
    reciprocal: dict[str, list[np.ndarray]] = {}
    for seed in SEEDS:
        base = new_model(tmp_path / f"base{seed}", "bert", texts, seed)
        intervals = {"landmark_intervals": (16, 32, 64)}
        folders = {
            "masked words": run(source, tmp_path / f"mlm{seed}", base, seed, mask_share=0.3, **intervals),
            "RetroMAE": run(source, tmp_path / f"r{seed}", base, seed, objective="retromae", **intervals),
        }
        untrained = {"steps": 1, "peak_lr": 1e-12, **intervals}
        folders["none"] = run(source, tmp_path / f"none{seed}", base, seed, **untrained)
        for name, folder in folders.items():
            reciprocal.setdefault(name, []).append(1.0 / ranks_of(folder, documents, queries))
    scores = {name: np.stack(of_seeds).mean(0) for name, of_seeds in reciprocal.items()}
    generator = np.random.default_rng(0)
    draws = generator.integers(0, len(long), (10_000, len(long)))
    with capsys.disabled():
        for name, values in scores.items():
            print(f"\n{name}: MRR {values.mean():.3f}", end="")
            if name != "RetroMAE":
                low, high = np.quantile((scores["RetroMAE"] - values)[draws].mean(1), [0.025, 0.975])
                print(f"; RetroMAE above it by {low:+.3f} to {high:+.3f}", end="")
        print()
    assert scores["RetroMAE"].mean() > scores["none"].mean()


def test_bench_rotary_bases_on_texts_longer_than_those_of_training(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words are pieces of few letters, so that 80 steps suffice to look at neighbours."""
    long = sorted((text for text in texts if len(text) >= MIN_LONG_CHARACTERS), key=len)
    held_out = set(long[::4])
    for name, kept in (("seen", [t for t in texts if t not in held_out]), ("unseen", sorted(held_out))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    losses: dict[int, list[list[float]]] = {}
    for base, seed in itertools.product(ROTARY_BASES, SEEDS):
        folder = tmp_path / f"{base}-{seed}"
        sizes = {"num_hidden_layers": 2, "rope_theta": base, "max_position_embeddings": max(LENGTHS)}
        model = new_model(folder / "base", "m3bert", texts, seed, vocabulary=512, **sizes)
        seen = {"steps": ROTARY_STEPS, "max_tokens": LENGTHS[0], "heldout_rows": 0}
        trained = run(tmp_path / "seen.jsonl", folder / "run", model, seed, **seen)
        of_lengths: list[float] = []
        for length in LENGTHS:
            read = {"max_tokens": length, "heldout_rows": HELD_OUT_TOKENS // length, "batch_rows": 1}
            again = folder / f"again-{length}"
            run(tmp_path / "unseen.jsonl", again, trained, 0, steps=1, evaluate_every=1, **read)
            records = read_log(again / "log.jsonl")
            of_lengths.append(next(r["heldout_loss"] for r in records if r["step"] == 0))
        losses.setdefault(base, []).append(of_lengths)
    with capsys.disabled():
        print(f"\nheld-out cross entropy in rows of {LENGTHS} tokens, trained on {LENGTHS[0]}")
        for base, of_seeds in losses.items():
            print(f"base {base}: " + "; ".join(" ".join(f"{loss:.3f}" for loss in each) for each in of_seeds))
    assert all(loss < np.log(512) for of_seeds in losses.values() for each in of_seeds for loss in each)
