"""FAISS on a card: a stand-in checks the calls and computes here; ``gpu`` runs the same on a real one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from cairn.pipeline import faiss_device
from cairn.pipeline.cluster.asymmetric_kmeans import train_clusters
from cairn.pipeline.config import ClusterConfig, IndexConfig, IngestConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.token_vectors.codebook import TokenCodebook
from cairn.pipeline.vector_index.faiss_build import build_faiss_index
from cairn.pipeline.vector_index.faiss_index import (
    BRUTE_FORCE_POSITIONS,
    FAISS_KINDS,
    FaissIndex,
    open_faiss_index,
)

from tests.exact_search import clustered_vectors

KINDS = tuple(FAISS_KINDS)
ROUNDING = 1e-4
FAILURE = "Error: 'err == cudaSuccess' failed: out of memory"

VECTORS, QUERIES = clustered_vectors(6_000), clustered_vectors(30, 1)


class CardIndex:
    """What answers for an index on the card."""

    def __init__(self, index: Any, card: FaissGpu) -> None:
        self.index, self.card = index, card

    def search(self, queries: np.ndarray, top_k: int, *, params: Any = None) -> Any:
        assert queries.dtype == np.float32
        assert queries.flags.c_contiguous
        assert top_k <= 2_048
        assert params is None or params.sel is None, "FAISS passes over a selector on a card"
        self.card.used(f"search {type(self.index).__name__}")
        return self.index.search(queries, top_k, params=params)


class FaissGpu:
    """faiss-gpu on a machine with a card that fails after so many uses."""

    def __init__(self, uses: int = 10**9) -> None:
        self.calls: list[str] = []
        self.uses_left = uses

    def __getattr__(self, name: str) -> Any:
        return getattr(faiss, name)

    def get_num_gpus(self) -> int:
        return 1

    class StandardGpuResources:
        def setTempMemory(self, num_bytes: int) -> None:  # noqa: N802 - FAISS's name
            assert 0 < num_bytes < 1 << 30

    class GpuClonerOptions:
        use_cuvs = True

    def used(self, call: str) -> None:
        self.calls.append(call)
        self.uses_left -= 1
        if self.uses_left < 0:
            raise RuntimeError(f"{FAILURE}\nat StandardGpuResources.cpp")

    def index_cpu_to_gpu(self, resources: Any, device: int, index: Any, options: Any) -> Any:
        assert isinstance(resources, self.StandardGpuResources)
        assert (device, options.use_cuvs) == (0, False)
        index = faiss.downcast_index(index)
        assert isinstance(index, (faiss.IndexFlat, faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer))
        self.used(f"copy {type(index).__name__}")
        return CardIndex(index, self) if index.ntotal else faiss.clone_index(index)


def choose(monkeypatch: pytest.MonkeyPatch, module: Any, device: str = "auto") -> None:
    monkeypatch.setattr(faiss_device, "faiss", module)
    monkeypatch.setattr(faiss_device, "_choice", faiss_device._Choice())
    monkeypatch.setattr(faiss_device, "MIN_CARD_PRODUCTS", 0)
    monkeypatch.setenv("CAIRN_INDEX_DEVICE", device)


@pytest.fixture(params=["stand-in", pytest.param("card", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = FaissGpu() if request.param == "stand-in" else faiss
    choose(monkeypatch, module, "gpu")
    faiss_device.use_index_device("gpu")
    return module


def built(path: Path, kind: Any, vectors: np.ndarray = VECTORS) -> FaissIndex:
    config = IndexConfig(index_kind=kind)
    description = build_faiss_index(lambda: iter([vectors]), len(vectors), vectors.shape[1], config, path)
    return open_faiss_index(path, description)


def built_here(monkeypatch: pytest.MonkeyPatch, path: Path, kind: str) -> FaissIndex:
    with monkeypatch.context() as patched:
        choose(patched, faiss, "cpu")
        description = built(path, kind).description
    return open_faiss_index(path, description)


def answers(index: FaissIndex, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    index.search(QUERIES, 10, **options)  # the first one is answered here
    return index.search(QUERIES, 10, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_index_built_and_searched_on_a_card_answers_as_on_processors(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    index = built(tmp_path / "card.faiss", kind)
    scores, positions = answers(index)
    with monkeypatch.context() as patched:
        choose(patched, faiss, "cpu")
        here = built(tmp_path / "here.faiss", kind)
        expected, nearest = here.search(QUERIES, 10)
    # K-means sums in another order there, so that a neighbour may be behind another list.
    assert np.isin(positions, nearest).mean() > 0.97
    assert np.abs(np.median(scores - expected)) < ROUNDING
    again = answers(open_faiss_index(tmp_path / "here.faiss", here.description))
    np.testing.assert_allclose(again[0], expected, atol=ROUNDING)  # one built here and searched there
    assert (again[1] == nearest).mean() > 0.99
    if isinstance(gpu, FaissGpu):
        assert (tmp_path / "card.faiss").read_bytes() == (tmp_path / "here.faiss").read_bytes()
        searched = {"flat": "IndexFlatIP", "ivf_sq8": "IndexIVFScalarQuantizer"}.get(kind)
        assert (f"search {searched}" in gpu.calls) == (searched is not None)


def test_clusters_and_token_codes_on_a_card_are_those_of_processors(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[np.ndarray, np.ndarray]:
        clusters = train_clusters(
            VECTORS[:500], VECTORS[500:1_000], ClusterConfig(num_clusters=8), surrogate_fingerprint="s"
        )
        codebook = TokenCodebook.fit(VECTORS[:2_048], np.ones(4, np.float32), 4)
        decoded = codebook.similarities(
            codebook.encode(VECTORS[:100]), np.eye(codebook.model_dim, dtype=np.float32)
        )
        return clusters.objective_I, decoded

    there = trained()
    if isinstance(gpu, FaissGpu):
        assert gpu.calls == ["copy IndexFlatIP", *["copy IndexFlatL2"] * 4]
    choose(monkeypatch, faiss, "cpu")
    objective, decoded = trained()
    assert there[0][-1] == pytest.approx(objective[-1], rel=0.02)
    assert np.abs(there[1] - decoded).mean() < 0.02


def test_kmeans_of_few_products_stays_on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    module, points = FaissGpu(), np.ascontiguousarray(VECTORS[:500])
    choose(monkeypatch, module, "gpu")
    monkeypatch.setattr(faiss_device, "MIN_CARD_PRODUCTS", 500 * 32 * 8 * 4 * 2)
    for parameters in ({"niter": 4}, {"niter": 7}, {"niter": 2, "nredo": 3}):
        faiss_device.train_kmeans(points, 8, parameters)
    assert module.calls == []
    for parameters in ({"niter": 8}, {"niter": 4, "nredo": 2}):
        faiss_device.train_kmeans(points, 8, parameters)
    assert module.calls == ["copy IndexFlatL2"] * 2


def test_filters_and_deleted_rows_are_for_processors(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = built_here(monkeypatch, tmp_path / "x.faiss", "ivf_sq8")
    allowed = np.arange(BRUTE_FORCE_POSITIONS + 500)
    assert answers(index, allowed=allowed)[1].max() < len(allowed)
    deleted = open_faiss_index(tmp_path / "x.faiss", index.description, deleted=np.arange(3_000))
    assert answers(deleted)[1].min() >= 3_000


@pytest.mark.parametrize("uses", [0, 1, 2, 3, 4])
def test_card_that_fails_in_the_middle_leaves_the_rest_to_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, uses: int
) -> None:
    expected = built_here(monkeypatch, tmp_path / "here.faiss", "ivf_sq8").search(QUERIES, 10)
    choose(monkeypatch, FaissGpu(uses=uses))
    with caplog.at_level(logging.WARNING):
        found = [answers(built(tmp_path / "card.faiss", "ivf_sq8")) for _ in range(2)][-1]
    np.testing.assert_array_equal(found[1], expected[1])
    (record,) = caplog.records
    assert record.message == f"index_device.card_failed, the processors go on: {FAILURE}"


class NoCard(FaissGpu):
    """faiss-gpu on a machine without a card."""

    def get_num_gpus(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("module", "device", "sentence"),
    [
        (faiss, "gpu", "gpu must have the package faiss-gpu, got faiss-cpu"),
        (NoCard(), "gpu", "gpu must find a CUDA card, got none; choose auto or cpu"),
        (faiss, "tpu", "must be one of auto, cpu, gpu, got 'tpu'"),
    ],
)
def test_device_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, device: Any, sentence: str
) -> None:
    if module is faiss and hasattr(faiss, "StandardGpuResources"):
        pytest.skip("faiss-gpu is installed")
    choose(monkeypatch, module, device)
    with pytest.raises(ConfigError, match=f"index_device {sentence}"):
        faiss_device.use_index_device(device)
    with pytest.raises(ConfigError, match=f"index_device {sentence}"):
        answers(built(tmp_path / "x.faiss", "ivf_sq8"))


def test_ingest_that_asks_for_a_card_reads_nothing_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cairn.pipeline.line.build_index import build_index  # needs LanceDB, which tests of a card do not

    module = NoCard()
    choose(monkeypatch, module)
    with pytest.raises(ConfigError, match="must find a CUDA card"):
        build_index(["nowhere"], tmp_path, "notes", IngestConfig(index_device="gpu"))
    choose(monkeypatch, module)
    answers(built(tmp_path / "x.faiss", "ivf_sq8"))
    assert module.calls == [], "auto asks nothing of a card that is not there"
