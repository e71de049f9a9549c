"""Measure training: memory of the tiled losses, and times beside a plain contrastive step's.

Goals: losses stay within bounded memory; GradCache takes at most 1.5 times as long as a plain step, masked
words at most 1.25 times at equal tokens, RetroMAE 1.4 times. It is measured on all-MiniLM-L6-v2 and passages
with one thread, in runs that alternate in one process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.grad_cache import cached_backward, plain_backward
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder
from cairn.pipeline.lab.train.losses import contrastive_loss
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.pretrain import EnhancedDecoder, MaskedText, PretrainHeads, vocabulary_of
from cairn.pipeline.lab.train.sequences import SequenceMaker, split_rows
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.token_stream import TokenStream
from cairn.pipeline.lab.train.trainer import add_gradient
from cairn.pipeline.lab.train.training_files import Texts
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.types import silent_progress

pytestmark = pytest.mark.bench

PRETRAINED_ROWS, PRETRAINED_TOKENS = 8, 256
MAX_PRETRAIN_RATIO = {"mlm": 1.25, "m3bert": 2.2, "retromae": 3.5}
PRETRAINING: dict[str, dict[str, Any]] = {
    "mlm": {"objective": "mlm"},
    "m3bert": {"objective": "mlm", "matryoshka_layers": (2, 4, 6), "matryoshka_dims": (32, 64, 128, 384)},
    "retromae": {"objective": "retromae", "landmark_intervals": (32, 64, 128)},
}
BATCH, VECTOR_DIM, REPEATS = 8_192, 384, 3
NUM_PASSAGES, CONTEXT_DOCUMENTS, MICRO_BATCH_TOKENS = 48, 16, 1_024
MAX_GRAD_CACHE_RATIO = 1.5

MEMORY_PROGRAM = """
import resource, torch
from cairn.pipeline.lab.train.losses import contrastive_loss, plain_contrastive_loss
torch.set_num_threads(1)
x = torch.nn.functional.normalize(torch.randn({batch}, {dim}), dim=1).requires_grad_()
{loss}(x[:64], x[:64], torch.arange(64)).backward()
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
{loss}(x, x, torch.arange(len(x))).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the time of one thread, which other work on the machine does not lengthen much."""
    start = time.process_time()
    call()
    return time.process_time() - start


def test_bench_tiled_loss_memory_at_a_large_batch(capsys: pytest.CaptureFixture[str]) -> None:
    grown = {
        loss: int(
            subprocess.run(
                [sys.executable, "-c", MEMORY_PROGRAM.format(batch=BATCH, dim=VECTOR_DIM, loss=loss)],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        / 1024
        for loss in ("contrastive_loss", "plain_contrastive_loss")
    }
    with capsys.disabled():
        print(
            f"\nloss and gradient of {BATCH:,} pairs: {grown['contrastive_loss']:.0f} MiB, plain "
            f"{grown['plain_contrastive_loss']:.0f} MiB"
        )
    assert grown["contrastive_loss"] < 192 < grown["plain_contrastive_loss"]


def test_bench_grad_cache_against_a_plain_step(
    sample_passages: Callable[[int], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    passages = sample_passages(NUM_PASSAGES)
    checkpoint = read_checkpoint(model_folder("all-MiniLM-L6-v2"))
    pairs = TrainingPairs(
        queries=tuple(passage[:60] for passage in passages),
        documents=tuple(passages),
        titles=("",) * len(passages),
        sources=("s",) * len(passages),
    )
    maker = SequenceMaker(checkpoint, pairs, pooling="lmk", max_query_tokens=64, max_document_tokens=256)
    units = [tuple(range(start, start + 4)) for start in range(0, NUM_PASSAGES, 4)]
    batch = maker.make(units, np.full(len(units), 64), np.zeros(len(units), np.bool_))
    context = maker.context(range(CONTEXT_DOCUMENTS), 64)
    model = LandmarkEncoder(checkpoint)
    positive = torch.from_numpy(batch.positive_Q)
    first_row_of_text = torch.from_numpy(np.unique(batch.text_B, return_index=True)[1])

    def loss(embedded: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (embeddings,) = embedded
        texts = torch.nn.functional.normalize(embeddings[first_row_of_text], dim=1)
        return contrastive_loss(texts[:NUM_PASSAGES], texts[NUM_PASSAGES:], positive)

    def step(backward: Callable[..., torch.Tensor], max_tokens: int) -> None:
        model.zero_grad()
        first = [lambda part=part: model.embed_documents(part) for part in split_rows(context, max_tokens)]
        second = [
            lambda context_CD, part=part: (model(part, context_CD),)
            for part in split_rows(batch.rows, max_tokens)
        ]
        backward(first, second, loss)

    step(plain_backward, 1 << 20)
    measured = [
        (
            seconds(lambda: step(cached_backward, MICRO_BATCH_TOKENS)),
            seconds(lambda: step(plain_backward, 1 << 20)),
        )
        for _ in range(REPEATS)
    ]
    ratio = statistics.median(cached / plain for cached, plain in measured)
    plain = min(plain for _, plain in measured)
    with capsys.disabled():
        print(
            f"\n{len(batch.rows.ids_N):,} tokens in {len(split_rows(batch.rows, MICRO_BATCH_TOKENS))} "
            f"micro-batches: GradCache {ratio:.2f} "
            f"of a plain step, which makes {len(batch.rows.ids_N) / plain:,.0f} tokens/s"
        )
    assert ratio <= MAX_GRAD_CACHE_RATIO


@pytest.mark.parametrize("name", PRETRAINING)
def test_bench_pretraining_against_a_plain_contrastive_step_of_as_many_tokens(
    name: str,
    sample_passages: Callable[[int], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    checkpoint = read_checkpoint(model_folder("all-MiniLM-L6-v2"))
    config = PretrainConfig(
        steps=10, batch_rows=PRETRAINED_ROWS, max_tokens=PRETRAINED_TOKENS, heldout_rows=0, precision="fp32",
        **PRETRAINING[name],
    )  # fmt: skip
    passages = tuple(dict.fromkeys(sample_passages(200)))
    stream = TokenStream(
        Texts(texts=passages, languages=("",) * len(passages)), checkpoint, config, silent_progress
    )
    model = LandmarkEncoder(checkpoint)
    decoder = EnhancedDecoder(
        model.model_dim, model.num_heads, PRETRAINED_TOKENS, torch.Generator(), model.position_table
    )
    heads = PretrainHeads(
        torch.zeros(len(model.token_table)), decoder if config.objective == "retromae" else None
    )
    task = MaskedText(
        folder=EncoderFolder(base=checkpoint, settings=EncoderConfig()),
        model=model,
        heads=heads,
        stream=stream,
        vocabulary=vocabulary_of(checkpoint),
        config=config,
    )
    rows = stream.batch(0).rows

    def contrast() -> None:
        texts = torch.nn.functional.normalize(model(rows, landmarks=False), dim=1)
        half = len(texts) // 2
        contrastive_loss(texts[:half], texts[half:], torch.arange(half)).backward()

    contrast()
    add_gradient(task.batch(0), model, config)
    measured = [
        (processor_seconds(lambda: add_gradient(task.batch(0), model, config)), processor_seconds(contrast))
        for _ in range(REPEATS)
    ]
    ratio = statistics.median(ours / plain for ours, plain in measured)
    tokens = len(rows.ids_N) / min(ours for ours, _ in measured)
    with capsys.disabled():
        print(
            f"\n{name}: {ratio:.2f} of a plain contrastive step of {len(rows.ids_N):,} tokens, "
            f"{tokens:,.0f} tokens/s"
        )
    assert ratio <= MAX_PRETRAIN_RATIO[name]
