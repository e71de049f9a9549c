"""Encoding speed against sentence-transformers, in one process on one set of threads, runs interleaved.

    pytest -m bench -s tests/benchmarks/test_bench_encode.py

The corpus is made here: opening passages of the standard library's docstrings, about 69 tokens each. CAIRN_BENCH_PASSAGES changes how many.
"""

from __future__ import annotations

import ast
import os
import statistics
import sysconfig
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import EncoderConfig
from pipeline.encode.documents import DocumentEncoder
from pipeline.encode.queries import TextQueryEncoder
from pipeline.model.backbone import load_backbone
from pipeline.model.embedded_weights import embedded_folder
from pipeline.model.precision import has_native_bf16

NUM_PASSAGES = int(os.environ.get("CAIRN_BENCH_PASSAGES", "5000"))
PASSAGE_CHARACTERS = (100, 500)
RUNS = 3
MIN_RATIO = 3.0
MIN_COSINE = 0.999
WHOLE_PASSAGE_TOKENS = 254


def _passages() -> list[str]:
    """Cut docstrings into passages at blank lines; the same on every machine with the same Python."""
    passages: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                for start in range(0, len(text), PASSAGE_CHARACTERS[1]):
                    passage = text[start : start + PASSAGE_CHARACTERS[1]].strip()
                    if len(passage) >= PASSAGE_CHARACTERS[0]:
                        passages[passage] = None
    found = list(passages)
    return [found[index * len(found) // NUM_PASSAGES] for index in range(min(NUM_PASSAGES, len(found)))]


def _seconds(action) -> tuple[float, object]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")
def test_encode_standard_library_passages_is_three_times_sentence_transformers():
    from sentence_transformers import SentenceTransformer

    passages = _passages()
    published = SentenceTransformer(str(embedded_folder()), device="cpu")
    config = EncoderConfig(landmark_interval=WHOLE_PASSAGE_TOKENS)
    encoder = DocumentEncoder(config, None, load_backbone(config, torch.device("cpu")))
    encoder.encode(passages[:100])
    published.encode(passages[:100])
    ours, theirs = [], []
    for _ in range(RUNS):
        seconds, encoded = _seconds(lambda: encoder.encode(passages))
        ours.append(seconds)
        seconds, vectors = _seconds(lambda: published.encode(passages))
        theirs.append(seconds)
    num_tokens = int(encoded.num_tokens.sum())
    is_whole = np.diff(encoded.chunk_offsets) == 1
    cosine = float((encoded.document_vectors_NV * vectors).sum(axis=1)[is_whole].min())
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"\npassages={len(passages)} mean_tokens={num_tokens / len(passages):.1f} threads={torch.get_num_threads()} "
        f"native_bf16={has_native_bf16(torch.device('cpu'))}\n"
        f"ours={num_tokens / min(ours):.0f} tokens/s sentence_transformers={num_tokens / min(theirs):.0f} tokens/s "
        f"ratio={ratio:.2f} (runs {', '.join(f'{run:.2f}' for run in ratios)}) min_cosine={cosine:.6f}"
    )
    assert cosine >= MIN_COSINE
    if has_native_bf16(torch.device("cpu")):
        assert ratio >= MIN_RATIO


@pytest.mark.bench
def test_encode_one_query_takes_milliseconds():
    encoder = TextQueryEncoder(EncoderConfig())
    seconds = [_seconds(lambda: encoder.encode_queries(["how do I reverse a list while iterating over it"]))[0] for _ in range(100)]
    median = statistics.median(seconds)
    print(f"\none query: median {1e3 * median:.1f} ms, best {1e3 * min(seconds):.1f} ms")
    assert median < 0.1
