from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine import precision
from cairn.pipeline.model.engine.openvino_backbone import OpenVinoTransformer, _group_size
from cairn.pipeline.model.engine.transformer import Layer, Mlp
from cairn.pipeline.model.engine.weights import Linear, Norm

from tests.model.published import LENGTHS, random_ids, worst

needs_vnni = pytest.mark.skipif(
    not precision._NATIVE_INT8_FLAGS & precision._cpu_flags(), reason="the processor must have VNNI"
)
needs_bf16 = pytest.mark.skipif(
    not precision.has_native_bf16(torch.device("cpu")), reason="the processor must have bf16"
)
SHORT = np.array([13, 13])
"""All of one length, within one block."""

TEXTS = [
    "Cairn reads a Parquet corpus and writes an index.",
    "short",
    "A context manager sets something up before a block and tears it down behind it, whatever happens "
    "inside. " * 4,
    "The threading module starts a function in another thread; a queue carries its result back.",
]


@pytest.fixture(
    scope="module",
    params=[
        *((name, False, {}) for name in ("bert", "roberta", "mpnet", "modernbert", "nomic_bert", "new")),
        ("modernbert", False, {"local_attention": 2, "norm_bias": True}),
        *((name, False, {}) for name in ("mistral", "qwen3")),
        ("llama", True, {}),
    ],
    ids=str,
)
def settings(request, make):
    """One model of every family, and of what families differ in."""
    family, is_causal, changes = request.param
    return {"model": str(make(family, **changes)), "causal": is_causal}


def _load(settings, **more):
    return load_backbone(EncoderConfig(**({"precision": "fp32", "backend": "openvino"} | settings | more)))


CONTEXT = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("lengths", "context", "temperature"),
    [(LENGTHS, None, 1.0), (SHORT, None, 1.0), (LENGTHS, CONTEXT, 0.6)],
    ids=["padded", "equal", "context"],
)
def test_hidden_states_of_every_family_equal_those_of_torch(settings, lengths, context, temperature):
    ours, theirs = _load(settings), _load(settings, backend="torch")
    ids = random_ids(theirs, lengths)
    assert isinstance(ours, OpenVinoTransformer)
    found, expected = (each.hidden_states(ids, lengths, context, temperature) for each in (ours, theirs))
    assert worst(found, expected, lengths) <= 1e-4


@pytest.mark.parametrize(
    ("rounding", "least"),
    [pytest.param("bf16", 0.999, marks=needs_bf16), pytest.param("int8", 0.99, marks=needs_vnni)],
)
def test_rounded_hidden_states_point_where_those_in_fp32_do(settings, rounding, least):
    ours, theirs = _load(settings, precision=rounding), _load(settings, backend="torch")
    ids = random_ids(theirs, LENGTHS)
    rounded, exact = (backbone.hidden_states(ids, LENGTHS) for backbone in (ours, theirs))
    for row, length in enumerate(LENGTHS.tolist()):
        cosine = torch.cosine_similarity(
            rounded[row, :length].mean(dim=0), exact[row, :length].mean(dim=0), dim=0
        )
        assert float(cosine) >= least
    assert worst(rounded, exact, LENGTHS) > 1e-4


def test_fingerprint_is_that_of_torch(tiny_model_folder):
    openvino, torch_ = (
        DocumentEncoder(EncoderConfig(model=str(tiny_model_folder), landmark_interval=16, backend=backend))
        for backend in ("openvino", "torch")
    )
    assert openvino.fingerprint == torch_.fingerprint


def test_threads_encode_side_by_side_without_mixing_rows(tiny_model_folder, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    backbone = _load({"model": str(tiny_model_folder)})
    lengths = [np.array([5 + number % 40, 3]) for number in range(60)]
    batches = [(random_ids(backbone, length) + number % 3, length) for number, length in enumerate(lengths)]
    alone = [backbone.hidden_states(*batch) for batch in batches]
    with ThreadPoolExecutor(2) as workers:
        together = list(workers.map(lambda batch: backbone.hidden_states(*batch), batches))
    for one, other, (_, length) in zip(alone, together, batches, strict=True):
        assert worst(one, other, length) <= 1e-6


@needs_vnni
def test_vectors_in_int8_do_not_depend_on_what_is_encoded_beside_them():
    encoder = DocumentEncoder(EncoderConfig(precision="int8", backend="openvino"))
    together = encoder.encode(TEXTS).chunk_vectors_MV
    alone = np.concatenate([encoder.encode([text]).chunk_vectors_MV for text in TEXTS])
    assert np.abs(together - alone).max() <= 1e-6


@pytest.mark.parametrize(
    ("hidden", "inner", "group"),
    [(384, 1536, 128), (768, 1152, 128), (1024, 2624, 64), (96, 192, 96), (24, 96, 0)],
)
def test_group_of_int8_divides_all_products(hidden, inner, group):
    def linear(width):
        return Linear(weight=torch.zeros(1, width))

    layer = Layer(
        qkv=linear(hidden),
        attention_output=linear(hidden),
        attention_norm=None,
        mlp=Mlp(up=linear(hidden), down=linear(inner), activation="gelu"),
        mlp_norm=Norm(weight=torch.ones(hidden), epsilon=1e-12),
    )
    assert _group_size([layer]) == group


def test_processor_without_vnni_goes_on_without_int8(tiny_model_folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2\n")
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
    with caplog.at_level(logging.WARNING):
        backbone = _load({"model": str(tiny_model_folder)}, precision="int8")
    assert backbone.precision == torch.float32
    assert "without VNNI" in caplog.text
    backbone = _load({"model": str(tiny_model_folder)}, precision="auto")
    assert backbone.precision == torch.float32, "nor has it bf16"
    theirs = _load({"model": str(tiny_model_folder)}, backend="torch")
    ids = random_ids(theirs, LENGTHS)
    assert worst(backbone.hidden_states(ids, LENGTHS), theirs.hidden_states(ids, LENGTHS), LENGTHS) <= 1e-4


def test_runtime_that_is_missing_or_broken_is_refused_with_the_way_out(tiny_model_folder, monkeypatch):
    def fails(name):
        raise ImportError(f"libtbb.so.12: cannot open\nshared object file, wanted by {name}")

    sentence = r"got none; install it with `pip install '\.\[openvino\]'`"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "openvino", None)
        with pytest.raises(ConfigError, match=sentence):
            _load({"model": str(tiny_model_folder)})
    monkeypatch.setattr("cairn.pipeline.model.backbone_loader.importlib.import_module", fails)
    sentence = r"got a broken one \(libtbb.so.12: cannot open shared object file.*; install it again"
    with pytest.raises(ConfigError, match=sentence) as caught:
        _load({"model": str(tiny_model_folder)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_both_stages_of_cde_equal_those_of_torch(make_cde, version):
    folder = {"model": str(make_cde(version))}
    ours, theirs = (_load(folder, backend=backend) for backend in ("openvino", "torch"))
    lengths, ids = np.array([30, 30, 7, 1]), random_ids(theirs, np.array([30, 30, 7, 1]))
    assert isinstance(ours.first_stage._backbone, OpenVinoTransformer)
    for one, other, context in (
        (ours, theirs, CONTEXT[:3]),
        (ours, theirs, None),
        (ours.first_stage, theirs.first_stage, None),
    ):
        found, expected = (each.hidden_states(ids, lengths, context) for each in (one, other))
        assert worst(found, expected, lengths) <= 1e-4


REPORTED = """
import os, sys
forks = []
os.register_at_fork(before=lambda: forks.append(1))
from cairn.pipeline.model.engine.openvino_backbone import ov
import time
time.sleep(0.2)
print(ov.__name__, len(forks), "openvino_telemetry" in sys.modules)
"""


def test_import_of_the_runtime_reports_to_nobody(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "HOME": str(tmp_path)
    }
    run = subprocess.run(
        [sys.executable, "-c", REPORTED], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["openvino", "0", "False"]
    assert list(tmp_path.iterdir()) == []
