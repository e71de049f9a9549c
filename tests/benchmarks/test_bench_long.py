"""Compare tokens per second on documents of 8,192 tokens with documents of 512.

Measured are landmark attention and a backbone of local and global layers. Both lengths hold the same number
of tokens and are encoded in turn, so that load on the machine affects both. A ratio is the median over the
rounds. Token ids are random, so tokenising is not measured.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import embed_chunks
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmark_reader import LandmarkReader
from cairn.pipeline.model.landmarks import Chunks, Rows, lay_out
from cairn.pipeline.poolings import Attention

pytestmark = pytest.mark.bench

TOKENS, SHORT = 8_192, 512
ROUNDS = 5
BATCH_TOKENS = EncoderConfig().batch_tokens
NUM_CONTEXT = 512


def test_bench_landmark_attention_on_minilm() -> None:
    backbone = load_backbone(EncoderConfig())
    context = np.random.default_rng(0).normal(size=(NUM_CONTEXT, backbone.context_dim)).astype(np.float32)
    readers = {"alone": LandmarkReader(backbone), "context": LandmarkReader(backbone, context)}

    def embed(rows: Rows, reader: LandmarkReader | None = None) -> Callable[[], None]:
        return lambda: _drop(embed_chunks(backbone, rows, batch_tokens=BATCH_TOKENS, landmarks=reader))

    short, long = (_layout(backbone, length, 62, "landmark") for length in (SHORT, TOKENS))
    seconds = _in_turns(
        {
            "chunk": embed(_layout(backbone, TOKENS, 62, "chunk")),
            "short": embed(short, readers["alone"]),
            "long": embed(long, readers["alone"]),
            "short context": embed(short, readers["context"]),
            "long context": embed(long, readers["context"]),
        }
    )
    print(
        f"\nlandmark attention, MiniLM, 64-token rows, {torch.get_num_threads()} thread(s), {backbone.dtype}"
    )
    _print_ratio(seconds, "short", "long", f"tokens/s at {TOKENS} against {SHORT}, no context", ">= 0.5")
    _print_ratio(
        seconds, "short context", "long context", f"the same with {NUM_CONTEXT} context vectors", ">= 0.5"
    )
    _print_ratio(seconds, "chunk", "long", "tokens/s of a window of 8192 against chunk attention", "")
    _print_ratio(
        seconds, "long", "long context", f"tokens/s with {NUM_CONTEXT} context vectors against none", ""
    )


def test_bench_landmarks_and_length_of_local_global_layers(tiny_model_folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone(EncoderConfig(model=str(_modernbert(tmp_path / "model", tiny_model_folder))))

    def embed(length: int, interval: int) -> Callable[[], None]:
        rows = _layout(backbone, length, interval, "full")
        return lambda: _drop(embed_chunks(backbone, rows, batch_tokens=BATCH_TOKENS))

    seconds = _in_turns(
        {"short": embed(SHORT, SHORT - 2), "long": embed(TOKENS, TOKENS - 2), "landmarks": embed(TOKENS, 32)}
    )
    print(
        f"\nModernBERT-base's widths, 6 layers of random weights, {torch.get_num_threads()} thread(s), "
        f"{backbone.dtype}"
    )
    _print_ratio(seconds, "short", "long", f"tokens/s at {TOKENS} against {SHORT}", ">= 0.5")
    costs = sorted(many / one for many, one in zip(seconds["landmarks"], seconds["long"], strict=True))
    print(
        f"cost of 32-token landmarks = {statistics.median(costs):.3f}  (rounds {costs[0]:.3f} to "
        f"{costs[-1]:.3f}; goal <= 1.15)"
    )


def _layout(backbone: Backbone, length: int, interval: int, attention: Attention) -> Rows:
    """Lay out ``TOKENS`` tokens in documents whose windows hold ``length``, special tokens included."""
    per_chunk, shared = (1, 1) if attention == "full" else (2, 0)
    own = (length - shared) * interval // (interval + per_chunk)
    sizes = [min(interval, own - start) for start in range(0, own, interval)]
    num_texts = TOKENS // length
    chunks = Chunks(
        token_offsets=np.cumsum([0, *sizes * num_texts]),
        chunk_offsets=np.arange(num_texts + 1) * len(sizes),
    )
    ids = (
        np.random.default_rng(1)
        .integers(5, len(backbone.token_embeddings), chunks.token_offsets[-1])
        .astype(np.int32)
    )
    return lay_out(
        ids,
        chunks,
        attention=attention,
        pooling="lmk",
        cls_id=backbone.cls_id,
        landmark_id=backbone.landmark_id,
        max_window_tokens=TOKENS,
    )


def _modernbert(folder: Path, tokenizer: Path) -> Path:
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    ModernBertModel(ModernBertConfig(num_hidden_layers=6, vocab_size=1_000, **special)).save_pretrained(
        folder
    )
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


def _drop(_: object) -> None:
    """Let go of a result."""


def _in_turns(actions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _print_ratio(seconds: dict[str, list[float]], base: str, other: str, label: str, goal: str) -> None:
    ratios = sorted(one / two for one, two in zip(seconds[base], seconds[other], strict=True))
    rates = [TOKENS / statistics.median(seconds[name]) for name in (base, other)]
    aim = f"; goal {goal}" if goal else ""
    print(f"{label} = {statistics.median(ratios):.2f}  ", end="")
    print(
        f"({rates[1]:.0f} against {rates[0]:.0f} tokens/s; rounds {ratios[0]:.2f} to {ratios[-1]:.2f}{aim})"
    )
