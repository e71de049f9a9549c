from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pytest
from cairn.pipeline.config import IndexConfig, IndexKind
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.vector_index import REFINE_SUFFIX, faiss_build
from cairn.pipeline.vector_index.faiss_build import build_faiss_index
from cairn.pipeline.vector_index.faiss_index import (
    BRUTE_FORCE_POSITIONS,
    FAISS_KINDS,
    FaissIndex,
    choose_kind,
    open_faiss_index,
)

from tests.exact_search import clustered_vectors, nearest

KINDS = tuple(FAISS_KINDS)
NUM_VECTORS, VECTOR_DIM = 6_000, 32


VECTORS = clustered_vectors(NUM_VECTORS)
QUERIES = clustered_vectors(50, seed=1)


def stream_of(vectors: np.ndarray, block: int = 1_000) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: (vectors[start : start + block] for start in range(0, len(vectors), block))


def build(
    folder: Path, kind: Any, vectors: np.ndarray = VECTORS, block: int = 1_000
) -> tuple[FaissIndex, dict[str, Any], Path]:
    path = folder / f"{kind}.faiss"
    description = build_faiss_index(
        stream_of(vectors, block), len(vectors), vectors.shape[1], IndexConfig(index_kind=kind), path
    )
    return open_faiss_index(path, description), description, path


@pytest.fixture(scope="module", params=KINDS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FaissIndex:
    return build(tmp_path_factory.mktemp("faiss"), request.param)[0]


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.mean([np.isin(true, got).mean() for got, true in zip(found, expected, strict=True)]))


def test_search_agrees_with_the_exact_index(index: FaissIndex) -> None:
    expected = nearest(VECTORS, QUERIES, 10)
    scores, found = index.search(QUERIES, 10)
    assert recall(found, expected) >= 0.97
    assert np.abs(index.reconstruct(np.arange(100, 150)) - VECTORS[100:150]).max() < 0.02
    assert index.reconstruct(np.arange(0)).shape == (0, VECTOR_DIM)
    assert np.allclose(scores, np.einsum("qkv,qv->qk", VECTORS[found], QUERIES), atol=0.02)


@pytest.mark.parametrize("num_allowed", [3, 700, BRUTE_FORCE_POSITIONS + 500])
def test_search_within_allowed_positions_agrees_with_the_exact_index(
    index: FaissIndex, num_allowed: int
) -> None:
    allowed = np.random.default_rng(2).choice(NUM_VECTORS, num_allowed, replace=False).astype(np.int64)
    expected = nearest(VECTORS, QUERIES, 10, allowed)
    _, found = index.search(QUERIES, 10, allowed)
    assert set(found[found >= 0].tolist()) <= set(allowed.tolist())
    assert recall(found, expected) >= 0.97
    scores, none = index.search(QUERIES[:2], 3, allowed[:0])
    assert np.all(none == -1)
    assert np.all(scores == -np.inf)


@pytest.mark.parametrize("allowed", [range(40), [7, 3, 3, 19]])
def test_search_within_few_positions_orders_equal_scores_by_position(
    tmp_path: Path, allowed: Sequence[int]
) -> None:
    vectors = np.random.default_rng(0).integers(-2, 3, (40, 4)).astype(np.float32)  # many products are equal
    index, _, _ = build(tmp_path, "flat", vectors)
    found = index.search(vectors[:5], 8, np.array(allowed))[1]
    assert found.tolist() == nearest(vectors, vectors[:5], 8, np.array(allowed)).tolist()
    scores, all_ = index.search(vectors[:5], 45)  # more than there are
    assert all_[:, :40].tolist() == nearest(vectors, vectors[:5], 40).tolist()
    assert np.all(all_[:, 40:] == -1)
    assert np.all(scores[:, 40:] == -np.inf)


def test_search_does_not_depend_on_the_number_of_queries(index: FaissIndex) -> None:
    _, together = index.search(QUERIES, 5)
    alone = np.concatenate([index.search(QUERIES[i : i + 1], 5)[1] for i in range(len(QUERIES))])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_reconstruct_gives_to_the_bit_what_faiss_itself_decodes(tmp_path: Path, kind: str) -> None:
    index, _, path = build(tmp_path, kind)
    own = faiss.read_index(str(path if kind != "ivf_rabitq" else path.with_name(path.name + REFINE_SUFFIX)))
    if kind == "ivf_sq8":
        own.make_direct_map(True)
    positions = np.random.default_rng(3).integers(0, NUM_VECTORS, 500)
    assert np.array_equal(index.reconstruct(positions), own.reconstruct_batch(positions))


@pytest.mark.parametrize("kind", KINDS)
def test_build_of_the_same_vectors_gives_faiss_own_bytes_whatever_the_blocks(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, description, first = build(tmp_path / "a", kind, VECTORS[:3_000], block=1_000)
    monkeypatch.setattr(faiss_build, "SPILL_VECTORS", 700)
    _, again, second = build(tmp_path / "b", kind, VECTORS[:3_000], block=333)
    assert description == again
    for path in sorted(first.parent.iterdir()):
        assert path.read_bytes() == (second.parent / path.name).read_bytes()
    if kind == "flat":
        plain = faiss.IndexFlatIP(VECTOR_DIM)
        plain.add(VECTORS[:3_000])
        assert first.read_bytes() == faiss.serialize_index(plain).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_build_of_very_few_vectors_can_be_searched(tmp_path: Path, kind: str, count: int) -> None:
    index, _, _ = build(tmp_path, kind, VECTORS[:count])
    _, found = index.search(QUERIES[:2], 3)
    assert found.shape == (2, 3)
    assert np.all((found >= 0).sum(axis=1) == min(count, 3))


def test_build_probes_as_few_lists_as_hold_the_target_share_of_true_neighbours(tmp_path: Path) -> None:
    _, description, path = build(tmp_path, "ivf_sq8")
    plain = faiss.read_index(str(path))  # owns the quantizer: must outlive it
    quantizer = faiss.downcast_index(plain.quantizer)
    neighbours = nearest(VECTORS, QUERIES, 10)
    lists = quantizer.search(VECTORS[neighbours.ravel()], 1)[1].reshape(neighbours.shape)
    probed = quantizer.search(QUERIES, description["nprobe"])[1]
    share = np.mean([np.isin(wanted, found).mean() for wanted, found in zip(lists, probed, strict=True)])
    assert share == pytest.approx(description["probed_recall_at_10"], abs=0.03)
    assert description["probed_recall_at_10"] >= 0.985
    assert description["nprobe"] < description["nlist"] / 2


@pytest.mark.parametrize(
    ("num_vectors", "kind"),
    [(0, "flat"), (20_000, "flat"), (20_001, "ivf_sq8"), (4_999_999, "ivf_sq8"), (5_000_000, "ivf_rabitq")],
)
def test_choose_kind_follows_the_thresholds(num_vectors: int, kind: str) -> None:
    assert choose_kind(num_vectors, IndexConfig())[0] == kind
    assert {"auto", *FAISS_KINDS} == set(get_args(IndexKind))


def test_open_of_a_file_that_is_damaged_or_does_not_fit_its_description_is_refused(tmp_path: Path) -> None:
    _, description, path = build(tmp_path, "flat", VECTORS[:100])
    with pytest.raises(DamageError, match="must be one of flat, ivf_sq8, ivf_rabitq, got 'hnsw'"):
        open_faiss_index(path, description | {"kind": "hnsw"})
    with pytest.raises(IntegrityError, match="must hold 99 vectors"):
        open_faiss_index(path, description | {"num_vectors": 99})
    content = bytearray(path.read_bytes())
    size_at = len(content) - 100 * VECTOR_DIM * 4 - 8
    content[size_at : size_at + 8] = (1 << 40).to_bytes(8, "little")  # it claims huge vectors
    path.write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match="cannot be read"):
        open_faiss_index(path, description)
    _, description, path = build(tmp_path, "ivf_sq8", VECTORS[:3_000])
    path.write_bytes(path.read_bytes()[:-1_000])
    with pytest.raises(IntegrityError):
        open_faiss_index(path, description)


def test_lists_trained_in_two_levels_hold_the_neighbours_that_those_of_one_hold(
    index: FaissIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faiss_build, "ONE_LEVEL_LISTS", 64)
    two, _, _ = build(tmp_path, index.description["kind"])
    assert two.num_lists == index.num_lists
    exact = nearest(VECTORS, QUERIES, 10)
    assert recall(two.search(QUERIES, 10)[1], exact) >= recall(index.search(QUERIES, 10)[1], exact) - 0.02
    assert two.nprobe <= 2 * index.nprobe
