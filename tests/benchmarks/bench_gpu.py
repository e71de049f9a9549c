"""Check and time a GPU: encoder and training with their shares of peak, and FAISS beside the processors.

    python tests/benchmarks/bench_gpu.py --output tests/benchmarks/results/gpu.json

    tests     those marked `gpu`
    checks    vectors of the card beside those of the processors, and what memory that runs out changes
    encode    rows of 512 and 8,192 tokens, beside sentence-transformers
    train     a step of `cairn train` on rows of 512 tokens: plain, and behind 16 context vectors (eq. 5)
    faiss     with faiss-gpu: indexes of 500,000 vectors, built and searched on the card and without it

The model has random weights of ModernBERT-base's size in bf16. Both encoders make one mean-pooled vector of
each of the same texts, and tokenising counts for both. A part that fails says so in its place and the others
go on. After each the report, with card, versions and date, is written as JSON. All of it takes less than ten
minutes on one card; --tokens and --vectors make it shorter, and --parts leaves parts out.

FLOPs per token: 2 for each weight it is multiplied with, and 4 D for each key it attends to. Those are the
whole row in global layers and the window in local ones. A training step counts three times those of its
text's tokens: context vectors, and what is computed twice to save memory, count as nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig, IndexConfig, IndexDevice
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.faiss_device import use_index_device
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.lab.train.gradients import cached_backward
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder, autocast
from cairn.pipeline.lab.train.losses import contrastive_loss
from cairn.pipeline.lab.train.packed_rows import apart, split
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import TrainingBatch, add_gradient, make_optimizer
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import CUDA_BATCH_FACTOR
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.vector_index.faiss_build import build_faiss_index
from cairn.pipeline.vector_index.faiss_index import open_faiss_index
from tokenizers import Tokenizer, models, pre_tokenizers

WARM_UPS, REPEATS = 1, 3
LEAST_COSINE = 0.999
LEAST_SHARED = 0.95
"""Of the neighbours found, what two devices must share: K-means sums in another order on a card."""
MATMUL_SIZE = 8_192


@dataclass(frozen=True, kw_only=True)
class Size:
    """A ModernBERT by its numbers, and how much of it to time."""

    width: int = 768
    layers: int = 22
    heads: int = 12
    inner: int = 1_152
    window: int = 128
    vocabulary: int = 50_368
    lengths: tuple[int, ...] = (512, 8_192)
    tokens_timed: int = 1 << 20
    vectors: int = 500_000
    trained_rows: int = 256
    trained_length: int = 512
    micro_batch_tokens: int = 1 << 15

    def flops_a_token(self, length: int) -> float:
        products = (
            2
            * (
                self.width * 3 * self.width
                + self.width**2
                + self.width * 2 * self.inner
                + self.inner * self.width
            )
            * self.layers
        )
        num_global = -(-self.layers // 3)
        keys = num_global * length + (self.layers - num_global) * min(length, self.window + 1)
        return products + 4 * self.width * keys


BASE = Size()
SMALL = Size(
    width=64,
    layers=4,
    heads=4,
    inner=96,
    window=16,
    vocabulary=512,
    lengths=(64, 256),
    tokens_timed=2_048,
    vectors=3_000,
    trained_rows=8,
    trained_length=64,
    micro_batch_tokens=256,
)
"""For the test that this script still runs, on any machine."""


def write_model(folder: Path, size: Size) -> Path:
    """Write random weights in the published layout, as a folder both sides load."""
    from transformers import ModernBertConfig, ModernBertModel

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = [*special.values(), *(f"w{index}" for index in range(4, size.vocabulary))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special.values()])
    torch.manual_seed(0)
    config = ModernBertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=max(size.lengths),
        local_attention=size.window,
        vocab_size=size.vocabulary,
        pad_token_id=0,
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
    )
    ModernBertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    return folder


def random_texts(size: Size, length: int, count: int, seed: int = 0) -> list[str]:
    """Return texts that fill rows of ``length`` tokens, [CLS] and [SEP] among them."""
    ids = np.random.default_rng(seed).integers(4, size.vocabulary, (count, length - 2))
    return [" ".join(f"w{index}" for index in row) for row in ids.tolist()]


def encoder_of(folder: Path, device: torch.device, length: int, precision: str) -> DocumentEncoder:
    """Return our encoder with one chunk, its own tokens and [CLS] and [SEP], a text."""
    config = EncoderConfig(
        model=str(folder),
        landmark_interval=length - 2,
        window_tokens=length,
        window_overlap_tokens=0,
        precision=precision,
    )
    return DocumentEncoder(config, None, load_backbone(config, device))


def check_vectors(folder: Path, size: Size, device: torch.device) -> dict[str, float]:
    """Return the least cosine between vectors of the card in bf16 and of the CPU in float32.

    The texts have many lengths and are encoded in one batch.
    """
    texts = [
        text
        for length in (8, 40, 130, 512)
        for text in random_texts(size, min(length, max(size.lengths)), 3, seed=length)
    ]
    length = min(512, max(size.lengths))
    ours = encoder_of(folder, device, length, "bf16").encode(texts).document_vectors_NV
    exact = encoder_of(folder, torch.device("cpu"), length, "fp32").encode(texts).document_vectors_NV
    least = float((ours * exact).sum(axis=1).min())
    assert least >= LEAST_COSINE, f"the card's vectors must agree with the CPU's, got a cosine of {least}"
    return {"least_cosine_to_cpu_fp32": least}


def check_out_of_memory(folder: Path, size: Size, device: torch.device) -> dict[str, Any]:
    """Encode with most of the card's memory taken away.

    Batches are halved until they fit, and vectors stay.
    """
    length = min(512, max(size.lengths))
    encoder, texts = (
        encoder_of(folder, device, length, "bf16"),
        random_texts(size, length, 2 * CUDA_BATCH_FACTOR),
    )
    roomy = encoder.encode(texts).document_vectors_NV
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats(device)["num_ooms"]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(device) + (256 << 20)) / total, device
    )
    try:
        tight = encoder.encode(texts).document_vectors_NV
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    failures = torch.cuda.memory_stats(device)["num_ooms"] - before
    assert failures, "the batch must not fit in what is left"
    least = float((roomy * tight).sum(axis=1).min())
    assert least >= LEAST_COSINE, f"a smaller batch must give the same vectors, got a cosine of {least}"
    return {"least_cosine_after_out_of_memory": least, "failures": failures}


def matmul_tflops(device: torch.device, size: int = MATMUL_SIZE) -> float:
    """Return what one large bf16 product of random numbers reaches: the card's practical peak."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: [a @ b for _ in range(10)], device) / 10
    return 2 * size**3 / seconds / 1e12


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of an action, after warm-ups."""
    seconds: list[float] = []
    for number in range(WARM_UPS + REPEATS):
        synchronise(device)
        started = time.perf_counter()
        action()
        synchronise(device)
        if number >= WARM_UPS:
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)[len(seconds) // 2]


def synchronise(device: torch.device) -> None:
    """Wait for the card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_length(
    folder: Path, size: Size, length: int, device: torch.device, peak_tflops: float
) -> dict[str, float]:
    """Time both sides on rows of one length, from texts to vectors; ours also without the tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    count = max(2, size.tokens_timed // length)
    texts, tokens = random_texts(size, length, count), count * length
    encoder = encoder_of(folder, device, length, "bf16")
    our_seconds = timed(lambda: encoder.encode(texts), device)
    ids = np.random.default_rng(0).integers(
        4, size.vocabulary, (max(1, CUDA_BATCH_FACTOR * 1_024 // length), length)
    )
    lengths = np.full(len(ids), length)
    pass_seconds = timed(lambda: encoder.backbone.hidden_states(ids, lengths), device)
    body = Transformer(
        str(folder),
        max_seq_length=length,
        model_kwargs={"dtype": torch.bfloat16, "attn_implementation": "sdpa"},
    )
    published = SentenceTransformer(modules=[body, Pooling(size.width, "mean")], device=str(device))
    their_seconds = min(
        timed(lambda batch=batch: published.encode(texts, batch_size=batch, show_progress_bar=False), device)
        for batch in sorted({max(1, 16_384 // length), max(1, 65_536 // length)})
    )
    flops = size.flops_a_token(length)
    pass_tokens_a_second = ids.size / pass_seconds
    return {
        "tokens_a_second": tokens / our_seconds,
        "tokens_a_second_of_the_pass": pass_tokens_a_second,
        "mega_flops_a_token": flops / 1e6,
        "mfu_of_practical_peak": pass_tokens_a_second * flops / 1e12 / peak_tflops,
        "sentence_transformers_tokens_a_second": tokens / their_seconds,
        "ratio_to_sentence_transformers": their_seconds / our_seconds,
    }


CONTEXT_VECTORS, CONTEXT_TOKENS = 16, 64


def time_training(folder: Path, size: Size, device: torch.device, peak_tflops: float) -> dict[str, Any]:
    """Time steps of `cairn train` at equal tokens of text, plain and behind a context that is embedded too.

    Half of the rows are queries, each with one of the others as its document.
    """
    config = TrainConfig(
        steps=WARM_UPS + REPEATS, precision="bf16", micro_batch_tokens=size.micro_batch_tokens
    )
    rng = np.random.default_rng(0)

    def rows_of(count: int, length: int) -> Rows:
        ids = rng.integers(4, size.vocabulary, count * length, dtype=np.int32)
        return apart(ids, np.full(count, length))

    rows, context = rows_of(size.trained_rows, size.trained_length), rows_of(CONTEXT_VECTORS, CONTEXT_TOKENS)
    num_queries = size.trained_rows // 2
    positive_Q = torch.arange(num_queries, device=device)
    report: dict[str, Any] = {}
    for name, read in (("plain", []), ("eq. 5", split(context, config.micro_batch_tokens))):
        model = LandmarkEncoder(read_checkpoint(folder)).to(device)
        optimizer = make_optimizer(model, config)

        def embed(part: Rows, context_CD: torch.Tensor | None, model: Any = model) -> Any:
            with autocast(model, config):
                return (model(part, context_CD).float(),)

        def embed_context(part: Rows, model: Any = model) -> torch.Tensor:
            with autocast(model, config):
                return model.embed_documents(part).float()

        def loss_of(embedded: Any) -> torch.Tensor:
            unit = torch.nn.functional.normalize(embedded[0], dim=1)
            return contrastive_loss(unit[:num_queries], unit[num_queries:], positive_Q, temperature=0.02)

        losses: list[float] = []

        def step(
            read: Any = read, model: Any = model, optimizer: Any = optimizer, losses: Any = losses
        ) -> None:
            optimizer.zero_grad(set_to_none=True)
            first = [partial(embed_context, part) for part in read]
            second = [partial(embed, part) for part in split(rows, config.micro_batch_tokens)]
            batch = TrainingBatch(backward=lambda: cached_backward(first, second, loss_of))
            losses.append(add_gradient(batch, model)[0])
            optimizer.step()

        tokens_a_second = len(rows.ids) / timed(step, device)
        assert np.isfinite(losses).all(), f"losses must be finite, got {losses}"
        flops = 3 * size.flops_a_token(size.trained_length)
        report[name] = {
            "tokens_a_second": tokens_a_second,
            "mfu_of_practical_peak": tokens_a_second * flops / 1e12 / peak_tflops,
            "losses": losses,
        }
        if device.type == "cuda":
            report[name]["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
    report["eq. 5 against plain"] = report["eq. 5"]["tokens_a_second"] / report["plain"]["tokens_a_second"]
    return report


FAISS_QUERIES, FAISS_TOP_K, FAISS_DIM = 1_000, 50, 384


def time_faiss(folder: Path, size: Size, kind: Any, devices: Sequence[IndexDevice]) -> dict[str, Any]:
    """Build and search an index on each device; return seconds, and what the devices share."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((256, FAISS_DIM)).astype(np.float32)

    def vectors_of(count: int) -> np.ndarray:
        noise = rng.standard_normal((count, FAISS_DIM), dtype=np.float32)
        vectors = topics[rng.integers(0, len(topics), count)] + noise
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    vectors, queries = vectors_of(size.vectors), vectors_of(FAISS_QUERIES)
    report: dict[str, Any] = {}
    found: dict[str, np.ndarray] = {}
    for device in devices:
        use_index_device(device)
        path, started = folder / f"{kind}-{device}.faiss", time.perf_counter()
        description = build_faiss_index(
            lambda: (vectors[start : start + 16_384] for start in range(0, len(vectors), 16_384)),
            len(vectors),
            FAISS_DIM,
            IndexConfig(index_kind=kind),
            path,
        )
        built = time.perf_counter() - started
        index = open_faiss_index(path, description)
        for _ in range(2):  # the second search copies the index
            index.search(queries, FAISS_TOP_K)
        started = time.perf_counter()
        _, found[device] = index.search(queries, FAISS_TOP_K)
        report[device] = {"built_seconds": built, "1000_queries_seconds": time.perf_counter() - started}
    use_index_device("auto")
    first, *others = found.values()
    shares = [np.mean([np.isin(a, b).mean() for a, b in zip(first, each, strict=True)]) for each in others]
    report["shared"] = [float(share) for share in shares]
    assert all(share > LEAST_SHARED for share in shares), f"{kind}: the devices share {shares}"
    return report


def run_marked_tests() -> str:
    """Run the tests that need a card; return pytest's last line.

    Files without such a test are not read, and warnings of other versions than ours are no errors.
    """
    root = Path(__file__).parents[2]
    files = [path for path in sorted(root.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default"]
    command += ["--tb", "short"]
    ended = subprocess.run(
        [*command, *map(str, files)], capture_output=True, text=True, cwd=root, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6_000:]
    return ended.stdout.strip().splitlines()[-1]


class Report:
    """What was found, written after every part; ``failed`` names the parts that raised."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.processor() or "cpu",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "faiss": faiss.__version__,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        self.failed: list[str] = []
        self._path = path

    def add(self, name: str, action: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            self.found[name] = action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts go on
            traceback.print_exc()
            self.failed.append(name)
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}, {time.perf_counter() - started:.1f} s: {self.found[name]}", flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=2) + "\n")


def measure(size: Size, device: torch.device, parts: Sequence[str], path: Path | None) -> Report:
    """Check and time what is asked for."""
    report, is_card = Report(path, device), device.type == "cuda"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_model(folder / "model", size)
        if "tests" in parts:
            report.add("tests", run_marked_tests if is_card else lambda: "none run: no card")
        peak = matmul_tflops(device, MATMUL_SIZE if is_card else 512)
        report.add("practical_peak_tflops", lambda: peak)
        if "checks" in parts:
            report.add("check of vectors", lambda: check_vectors(model, size, device))
            if is_card:
                report.add("check of memory", lambda: check_out_of_memory(model, size, device))
        if "train" in parts:
            report.add("train", lambda: time_training(model, size, device, peak))
        if "encode" in parts:
            for length in size.lengths:
                report.add(f"encode {length}", partial(time_length, model, size, length, device, peak))
        if "faiss" in parts:
            has_card = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
            if not has_card:
                report.found["faiss on the card"] = "left out: faiss-gpu is not installed, or finds no card"
            for kind in ("flat", "ivf_sq8", "ivf_rabitq"):
                on = ("gpu", "cpu") if has_card else ("cpu",)
                report.add(f"faiss {kind}", partial(time_faiss, folder, size, kind, on))
    return report


PARTS = ("tests", "checks", "encode", "train", "faiss")


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print and write; return 1 where a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where to write the report as JSON")
    parser.add_argument("--device", default="cuda", help="the device to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument("--tokens", type=int, help="tokens of each length that encoders are timed with")
    parser.add_argument("--vectors", type=int, help="vectors of each index")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model: shows that the script runs, measures nothing"
    )
    given = parser.parse_args(arguments)
    size = SMALL if given.small else BASE
    size = replace(
        size, tokens_timed=given.tokens or size.tokens_timed, vectors=given.vectors or size.vectors
    )
    device = torch.empty(0, device=given.device).device  # with its index, as limits of memory need it
    report = measure(size, device, given.parts, given.output)
    print(f"failed: {', '.join(report.failed) or 'nothing'}")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
