"""A tiny world to train in.

Three topics of words, questions that name a topic's word, documents that hold it.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.contrastive import TrainReport, pair_batch, train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.mixer_data import BaseVectors, Kind, MixerData, embed_sources
from cairn.pipeline.lab.train.pair_data import TrainingData
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.settings import MixerConfig, TrainConfig
from cairn.pipeline.lab.train.trainer import add_gradient
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.types import silent_progress
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.lab.train.families import tiny_new
from tests.tiny_models import TINY_WORDS

TOPICS = (("stone", "path", "mark", "way"), ("river", "mountain", "walk", "old"), ("cat", "mat", "sat", "on"))


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
def pairs_file(tmp_path: Path) -> Path:
    """Return sixty pairs of two sources as JSON lines."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in tiny_pairs(60)))
    return path


@pytest.fixture
def make_pairs() -> Callable[..., TrainingPairs]:
    """Return a maker of such pairs in memory."""

    def make(num_pairs: int, seed: int = 0) -> TrainingPairs:
        records = tiny_pairs(num_pairs, seed)
        columns = (
            tuple(record[name] for record in records) for name in ("query", "document", "title", "source")
        )
        queries, documents, titles, sources = columns
        return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources)

    return make


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
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


def dying_after(step: int, of_stage: str = "train") -> Callable[..., None]:
    """Return a listener that ends a run after a step, before it has done anything else."""

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == of_stage and done == step:
            raise KilledError

    return listen


def train_step(
    model: LandmarkEncoder,
    teacher: LandmarkEncoder | None,
    data: TrainingData,
    units: Sequence[Sequence[int]],
    step: int,
    config: TrainConfig,
    processes: Processes = ALONE,
) -> SimpleNamespace:
    """Add a step's gradient as the trainer does; return its loss, the gradient's norm and its report."""
    batch = pair_batch(model, teacher, data, units, step, config, processes)
    loss, norm = add_gradient(batch, model, config, processes)
    return SimpleNamespace(loss=loss, gradient_norm=norm, **batch.report())


class Threads(Processes):
    """Threads in the place of processes: what each brings lies in a shared list until all have read it."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _exchange(self, brought: Any) -> list[Any]:
        self._slots[self.rank] = brought
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def gather(self, parts: Mapping[int, torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
        found = {number: part for brought in self._exchange(dict(parts)) for number, part in brought.items()}
        return tuple(found[number] for number in range(count))

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor.clone())).sum(0))

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            found = [gradient for gradient in self._exchange(parameter.grad) if gradient is not None]
            parameter.grad = torch.stack(found).sum(0) if found else None

    def require_same(self, number: int, what: str) -> None:
        assert len(set(self._exchange(number))) == 1, what

    def wait(self) -> None:
        self._barrier.wait()


@pytest.fixture
def in_threads() -> Callable[[int, Callable[[Processes], Any]], list[Any]]:
    """Return a caller of a function in so many threads at once, each as one of as many processes."""

    def call(size: int, function: Callable[[Processes], Any]) -> list[Any]:
        slots, results, barrier = [None] * size, [None] * size, threading.Barrier(size, timeout=600)

        def work(rank: int) -> None:
            try:
                results[rank] = function(Threads(rank, size, slots, barrier))
            except BaseException:
                barrier.abort()
                raise

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


@dataclass(frozen=True, kw_only=True)
class PagedWorld:
    """Pages of sections in a file, and vectors of their texts in the cache of the base model."""

    file: Path
    cache: Path
    model: str
    settings: EncoderConfig

    @property
    def pairs(self) -> TrainingPairs:
        return read_pairs([self.file])

    def data(self, config: MixerConfig) -> MixerData:
        return embed_sources(self.pairs, BaseVectors(self.settings, self.cache), config, silent_progress)


@pytest.fixture
def make_paged_world(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., PagedWorld]:
    """Return a maker of pages whose sections look alike from page to page.

    A query asks for a section of a page, and a section's vector says which section it is and nothing of its
    page: the title's does (``clue`` = title), or the document's first chunk (opening), two chunks away from
    the one that answers.
    """

    def make(
        num_pages: int = 12, num_sections: int = 8, clue: str = "title", sources: tuple[str, ...] = ("s",)
    ) -> PagedWorld:
        generator = np.random.default_rng(0)

        def unit(vector: np.ndarray) -> np.ndarray:
            return vector / np.linalg.norm(vector)

        def near(vector: np.ndarray, noise: float = 0.6) -> np.ndarray:
            return unit(vector + noise * unit(generator.normal(size=32)))

        sections = [unit(generator.normal(size=32)) for _ in range(num_sections)]
        records: list[dict[str, str]] = []
        vectors: dict[Kind, dict[str, np.ndarray]] = {
            kind: {} for kind in ("document", "query", "title", "context")
        }
        for page in range(num_pages * len(sources)):
            source, about = sources[page // num_pages], unit(generator.normal(size=32))
            title = f"page {page}"
            vectors["title"][title] = near(about if clue == "title" else generator.normal(size=32), 0.2)[None]
            for number, section in enumerate(sections):
                record = {
                    "query": f"q {page} {number}",
                    "document": f"d {page} {number}",
                    "title": title,
                    "source": source,
                }
                records.append(record)
                vectors["query"][record["query"]] = near(unit(section + about), 0.2)[None]
                opening = [near(about), generator.normal(size=32)] if clue == "opening" else []
                chunks = np.stack([*opening, near(section)])
                vectors["document"][record["document"]] = chunks
                vectors["context"][record["document"]] = unit(chunks.sum(0))[None]
        file = tmp_path / "pages.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32")
        kept = BaseVectors(settings, tmp_path / "vectors")
        for kind, of_texts in vectors.items():
            counts = np.array([len(chunks) for chunks in of_texts.values()])
            kept.keep(
                kind, list(of_texts), counts, np.concatenate(list(of_texts.values())).astype(np.float16)
            )
        return PagedWorld(
            file=file, cache=tmp_path / "vectors", model=str(tiny_model_folder), settings=settings
        )

    return make


@pytest.fixture
def decoder(tiny_model_folder: Path, tmp_path: Path) -> Path:
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


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(
    one_thread: None, tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
) -> Callable[..., TrainReport]:
    def start(
        name: str = "run",
        progress: Any = None,
        sources: Path = pairs_file,
        judged: tuple[Path, ...] = (),
        **settings: Any,
    ) -> TrainReport:
        listener = {} if progress is None else {"progress": progress}
        config = TrainConfig(**{**LOOP_SETTINGS, **settings})
        return train(
            [pairs_file], tmp_path / name, config, base=str(tiny_model_folder), judged=judged, **listener
        )

    return start
