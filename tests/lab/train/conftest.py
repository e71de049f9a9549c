"""A tiny world to train in.

Three topics of words, questions that name a topic's word, documents that hold it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.contrastive import pair_batch, train
from cairn.pipeline.lab.train.distill import distill
from cairn.pipeline.lab.train.landmark_distillation import train_landmarks
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pair_data import TrainingData
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs
from cairn.pipeline.lab.train.pretrain import new_checkpoint, pretrain
from cairn.pipeline.lab.train.settings import DistillConfig, LandmarkConfig, PretrainConfig, TrainConfig
from cairn.pipeline.lab.train.trainer import RunReport, add_gradient
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.model.published import SIZES
from tests.tiny_models import TINY_WORDS

TOPICS = (("stone", "path", "mark", "way"), ("river", "mountain", "walk", "old"), ("cat", "mat", "sat", "on"))

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "mpnet": {},
    "modernbert": {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "nomic_bert": {},
    "new": {"rope_theta": 10_000.0, "type_vocab_size": 1},
    "m3bert": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
"""Of each family that training runs: settings beside the sizes."""


def tiny_new(family: str, tokenizer_folder: Path, *, seed: int = 0) -> Checkpoint:
    """Return a tiny model of new weights."""
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    return new_checkpoint(config, read_checkpoint(tokenizer_folder), seed=seed)


def tiny_pairs(num_pairs: int, seed: int = 0) -> list[dict[str, str]]:
    generator = random.Random(seed)
    records: list[dict[str, str]] = []
    for number in range(num_pairs):
        topic = TOPICS[number % 3]
        key = f"{generator.choice(topic)} {generator.choice('abcdefgh')}{number}"
        filler = " ".join(generator.choice([*topic, "the", "a"]) for _ in range(generator.randrange(4, 30)))
        records.append(
            {
                "query": f"the {key}",
                "document": f"{filler} {key} {filler}",
                "title": f"{topic[0]} {number // 6}",
                "source": f"s{number % 2}",
            }
        )
    return sorted(records, key=lambda record: (record["source"], record["title"]))


@pytest.fixture
def pairs_file(tmp_path):
    """Return sixty pairs of two sources as JSON lines."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in tiny_pairs(60)))
    return path


@pytest.fixture
def make_pairs():
    """Return a maker of such pairs in memory."""

    def make(num_pairs: int, seed: int = 0) -> TrainingPairs:
        return TrainingPairs(rows=tuple(PairRow(**record) for record in tiny_pairs(num_pairs, seed)))

    return make


@pytest.fixture
def texts_file(tmp_path):
    """Return a hundred texts as JSON lines, a quarter of them in German."""
    generator = random.Random(0)
    words = [word for word in TINY_WORDS if not word.startswith("#")]
    records = [
        {
            "text": " ".join(generator.choices(words, k=generator.randrange(3, 90))) + f" {number}",
            "language": "de" if number % 4 == 0 else "en",
        }
        for number in range(100)
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class KilledError(Exception):
    pass


def dying_after(step: int) -> Callable[..., None]:
    """Return a listener that ends a run after a step, before it has done anything else."""

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "train" and done == step:
            raise KilledError

    return listen


def train_step(
    model: LandmarkEncoder,
    teacher: LandmarkEncoder | None,
    data: TrainingData,
    units: Sequence[Sequence[int]],
    step: int,
    config: TrainConfig,
    max_norm: float = 1e9,
) -> SimpleNamespace:
    """Add a step's gradient as the trainer does; return its loss, the gradient's norm and its report."""
    batch = pair_batch(model, teacher, data, units, step, config)
    loss, norm = add_gradient(batch, model, max_norm)
    return SimpleNamespace(loss=loss, gradient_norm=norm, **batch.report())


@pytest.fixture
def decoder(tiny_model_folder, tmp_path):
    """Return a tiny decoder whose tokenizer ends a text and opens it with nothing."""
    shutil.copytree(tiny_model_folder, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", end)])
    tokenizer.save(str(path))
    save_encoder_folder(tmp_path / "decoder", tiny_new("qwen3", tmp_path / "tokenizer"), EncoderConfig())
    return tmp_path / "decoder"


LOOP_SETTINGS: dict[str, Any] = {
    "steps": 8,
    "batch_pairs": 12,
    "sequence_documents": 3,
    "max_document_tokens": 48,
    "context_documents": 4,
    "max_context_tokens": 12,
    "context_dropout": 0.2,
    "evaluate_every": 4,
    "checkpoint_every": 2,
    "peak_lr": 1e-3,
    "micro_batch_tokens": 300,
    "matryoshka_dims": (8, 32),
    "precision": "fp32",
}
RARELY: dict[str, Any] = {"steps": 6, "evaluate_every": 3, "checkpoint_every": 2, "precision": "fp32"}
PRETRAIN: dict[str, Any] = {
    **RARELY,
    "batch_rows": 4,
    "max_tokens": 48,
    "landmark_intervals": (4, 8),
    "heldout_rows": 4,
    "peak_lr": 3e-3,
    "micro_batch_tokens": 100,
}
DISTILL: dict[str, Any] = {
    **RARELY,
    "batch_texts": 8,
    "max_tokens": 24,
    "heldout_texts": 4,
    "peak_lr": 3e-3,
}
LANDMARKS: dict[str, Any] = {
    **RARELY,
    "batch_windows": 4,
    "window_tokens": 64,
    "landmark_intervals": (8, 12, 16),
    "title_tokens": 4,
    "heldout_windows": 4,
    "peak_lr": 3e-3,
}


@pytest.fixture
def one_thread(torch_threads):
    torch_threads(1)


@pytest.fixture
def start(one_thread, tmp_path, tiny_model_folder, pairs_file, texts_file):
    """Return what starts a training of any kind, of the tiny model, in the folder ``name``."""
    tiny = str(tiny_model_folder)

    def call(
        verb: str,
        name: str = "run",
        progress: Any = lambda *_: None,
        *,
        base: str = tiny,
        teacher: str = tiny,
        how: dict[str, Any] | None = None,
        **settings: Any,
    ) -> RunReport:
        folder, limits = tmp_path / name, {"progress": progress, **(how or {})}
        if verb == "train":
            config = TrainConfig(**{**LOOP_SETTINGS, **settings})
            return train([pairs_file], folder, config, base=base, **limits)
        if verb == "pretrain":
            config = PretrainConfig(**{**PRETRAIN, **settings})
            return pretrain([texts_file], folder, config, base=base, **limits)
        if verb == "train_landmarks":
            config = LandmarkConfig(**{**LANDMARKS, **settings})
            return train_landmarks(base, [texts_file], folder, config, **limits)
        config = DistillConfig(**{**DISTILL, **settings})
        return distill(teacher, base, [texts_file], folder, config, **limits)

    return call


@pytest.fixture
def run(start):
    """Return what trains on the pairs."""
    return partial(start, "train")
