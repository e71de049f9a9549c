"""Compare tokens per second with sentence-transformers at equal precision.

    python -m pytest tests/benchmarks/test_bench_encode.py -m bench -s

All use the same model, process, one thread and the same texts: passages of about 91 tokens, and texts of 512.
In int8 the peer is ONNX Runtime on the model under its own dynamic quantisation (``pip install onnx
onnxscript onnxruntime``). A precision that the processor does not multiply natively is left out. What a plain
product of this core reaches is printed beside what the encoders reach in their layers' products, so that a
ratio is read against what the core can give.

Each encodes all texts in one call, so that a peer that pads rows to the longest of a batch finds texts of
like length for it. They do so in turn, several times, so that load on the machine affects all of them. Load
disturbs the ratio of processor time least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import TextEncoder
from cairn.pipeline.model.document_encoder import one_torch_thread
from cairn.pipeline.model.engine.precision import default_device, resolve_precision
from cairn.pipeline.model.folders.names import embedded_folder

from tests.benchmarks.timing import timed

pytestmark = pytest.mark.bench

Compared = Literal["fp32", "bf16", "int8"]

PASSAGES: Final = 1_000
LONG_TEXTS: Final = 64
LONG_TOKENS: Final = 510
"""With [CLS] and [SEP] all positions that the model has."""
TURNS: Final = 5
LAYER_PRODUCTS: Final = 6 * 12 * 384**2
"""Multiplications a token in the layers of all-MiniLM-L6-v2, attention aside."""

FORMATS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
LEAST_COSINE: Final = {"fp32": 0.99999, "bf16": 0.999, "int8": 0.95}


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("is_long", [False, True])
def test_bench_encode_at_equal_precision(
    precision: Compared, is_long: bool, sample_passages: Callable[[int], list[str]], tmp_path: Path
) -> None:
    if (
        precision != "fp32"
        and resolve_precision("int8" if precision == "int8" else "auto", default_device())
        != FORMATS[precision]
    ):
        pytest.skip(f"this processor does not multiply {precision} natively")
    with one_torch_thread():
        texts = _long_texts(sample_passages) if is_long else sample_passages(PASSAGES)
        peer = _OnnxRuntime(tmp_path) if precision == "int8" else _sentence_transformers(precision)
        encoders = {
            f"cairn, {backend}": DocumentEncoder(
                EncoderConfig(
                    model="all-MiniLM-L6-v2",
                    landmark_interval=LONG_TOKENS,
                    backend=backend,
                    precision=precision,
                )
            )
            for backend in (("openvino",) if precision == "int8" else ("torch", "openvino"))
        }
        _compare(peer, encoders, texts, precision)


def _compare(peer: Any, encoders: dict[str, DocumentEncoder], texts: list[str], precision: Compared) -> None:
    name_of_peer = "ONNX Runtime" if precision == "int8" else "sentence-transformers"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (name_of_peer, *encoders)}
    least, tokens = 1.0, 0
    for encoder in (peer, *encoders.values()):
        encoder.encode(texts[:20])
    for _ in range(TURNS):
        *spent, theirs = timed(lambda: peer.encode(texts))
        seconds[name_of_peer].append((spent[0], spent[1]))
        for name, encoder in encoders.items():
            *spent, ours = timed(lambda encoder=encoder: encoder.encode(texts))
            seconds[name].append((spent[0], spent[1]))
            cosines = (ours.document_vectors_NV * theirs).sum(axis=1) / np.linalg.norm(theirs, axis=1)
            least = min(least, float(cosines[np.diff(ours.chunk_offsets) == 1].min()))
        tokens += int(ours.num_tokens.sum())
    a_text = tokens / len(texts) / TURNS
    print(f"\n{len(texts)} texts of {a_text:.0f} tokens, {precision}, one thread", end="")
    if precision != "int8":
        print(f"; a plain product makes {_product_gflops(FORMATS[precision]):.0f} GFLOP/s", end="")
    for name, of_turns in seconds.items():
        total, ratios = sum(clock for clock, _ in of_turns), []
        for index in range(2):
            pairs = zip(seconds[name_of_peer], of_turns, strict=True)
            ratios.append(statistics.median(their[index] / our[index] for their, our in pairs))
        print(
            f"\n{name}: {tokens / total:.0f} tokens/s, {2e-9 * LAYER_PRODUCTS * tokens / total:.0f} GFLOP/s "
            f"in layers, {ratios[0]:.2f} x by the clock, {ratios[1]:.2f} x of processor time (medians)",
            end="",
        )
    print(f"\nleast cosine {least:.6f}")
    assert least >= LEAST_COSINE[precision]


def _sentence_transformers(precision: Compared) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(embedded_folder()), device="cpu")
    model.max_seq_length = LONG_TOKENS + 2
    return model.bfloat16() if precision == "bf16" else model


class _OnnxRuntime:
    """The peer's model in ONNX Runtime: int8 with a scale for each channel, padded batches of 32."""

    def __init__(self, folder: Path) -> None:
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        from onnxruntime.quantization import QuantType, quantize_dynamic

        whole, rounded = str(folder / "model.onnx"), str(folder / "int8.onnx")
        self._model = _sentence_transformers("fp32")
        texts, tokens = (
            torch.export.Dim("texts", min=2),
            torch.export.Dim("tokens", min=2, max=LONG_TOKENS + 2),
        )
        example = self._tokens(["an example", "of two texts"])
        torch.onnx.export(
            self._model[0].auto_model.eval(),
            kwargs={name: torch.from_numpy(values) for name, values in example.items()},
            f=whole,
            output_names=["states"],
            dynamic_shapes={name: {0: texts, 1: tokens} for name in example},
            external_data=False,
        )
        quantize_dynamic(whole, rounded, per_channel=True, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(rounded, options, providers=["CPUExecutionProvider"])

    def encode(self, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        longest_first = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        vectors = np.empty((len(texts), 384), dtype=np.float32)
        for start in range(0, len(texts), 32):
            rows = longest_first[start : start + 32]
            inputs = self._tokens([texts[row] for row in rows])
            mask = inputs["attention_mask"][:, :, None]
            states = self._session.run(["states"], inputs)[0]
            vectors[rows] = (states * mask).sum(axis=1) / mask.sum(axis=1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _tokens(self, texts: list[str]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        features = self._model.tokenize(texts)
        return {name: features[name].numpy() for name in ("input_ids", "attention_mask")}


def _long_texts(sample_passages: Callable[[int], list[str]]) -> list[str]:
    """Return texts of exactly ``LONG_TOKENS`` tokens."""
    encoder = TextEncoder(EncoderConfig(model="all-MiniLM-L6-v2"))
    tokenizer = encoder._documents.backbone.tokenizer
    joined = tokenizer.encode(" ".join(sample_passages(10 * LONG_TEXTS)), add_special_tokens=False)
    starts = range(0, LONG_TOKENS * LONG_TEXTS, LONG_TOKENS)
    ends = [joined.offsets[start + LONG_TOKENS - 1][1] for start in starts]
    text = " ".join(sample_passages(10 * LONG_TEXTS))
    return [text[joined.offsets[start][0] : end] for start, end in zip(starts, ends, strict=True)]


def test_bench_one_query() -> None:
    encoder = TextEncoder(EncoderConfig())
    seconds = [
        timed(lambda: encoder.encode_queries(["how do I reverse a list while iterating over it"]))[0]
        for _ in range(100)
    ]
    print(f"\none query: median {1e3 * statistics.median(seconds):.1f} ms, best {1e3 * min(seconds):.1f} ms")


def _product_gflops(dtype: torch.dtype) -> float:
    left, right = (torch.ones(1_024, 1_024, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * 1_024**3 / min(timed(lambda: torch.mm(left, right, out=out))[0] for _ in range(30)) / 1e9
