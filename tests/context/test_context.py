"""The context of a collection: how it is drawn, its files and those of clusters, and drift from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.cluster.arrow_file import write_arrow_file
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.context.sampling import allocate, draw_context
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.errors import DamageError, FingerprintMismatchError, ModelError, SourceError
from hypothesis import example, given
from hypothesis import strategies as st

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.int64)
)
places = st.integers(0, 2_000)


def naive_allocate(sizes_k: list[int], num_documents: int) -> list[int]:
    total, wanted = sum(sizes_k), min(num_documents, sum(sizes_k))
    quotas = [Fraction(wanted * size, total) if total else Fraction(0) for size in sizes_k]
    given_places = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes_k)), key=lambda k: (given_places[k] - quotas[k], k))
    for k in by_remainder[: wanted - sum(given_places)]:
        given_places[k] += 1
    return given_places


@given(sizes, places)
@example(np.array([3, 3, 3], np.int64), 4)
def test_allocate_equals_naive_largest_remainder(sizes_k: np.ndarray, num_documents: int) -> None:
    found = allocate(sizes_k, num_documents)
    assert found.tolist() == naive_allocate(sizes_k.tolist(), num_documents)
    assert (found <= sizes_k).all()
    assert found.sum() == min(num_documents, sizes_k.sum())


def corpus(num_documents: int = 300, num_clusters: int = 7) -> tuple[list[str], np.ndarray]:
    clusters = (np.random.default_rng(2).random(num_documents) ** 2 * num_clusters).astype(np.int32)
    return [f"doc-{row}" for row in range(num_documents)], clusters


def test_draw_context_takes_each_clusters_share() -> None:
    ids, clusters = corpus()
    drawn = draw_context(ids, clusters, 40, seed=0)
    np.testing.assert_array_equal(
        np.bincount(clusters[drawn], minlength=7), allocate(np.bincount(clusters, minlength=7), 40)
    )
    assert (np.diff(clusters[drawn]) >= 0).all(), "ordered by cluster"
    every = draw_context(ids[:9], clusters[:9], 512, seed=0)
    assert sorted(every.tolist()) == list(range(9))


def test_draw_context_does_not_depend_on_row_order() -> None:
    ids, clusters = corpus()
    order = np.random.default_rng(3).permutation(len(ids))
    shuffled = [ids[row] for row in order]
    there = [ids[row] for row in draw_context(ids, clusters, 40, seed=0)]
    assert there == [shuffled[row] for row in draw_context(shuffled, clusters[order], 40, seed=0)]


def clusters(**changes: object) -> Clusters:
    rng = np.random.default_rng(1)
    chosen: dict[str, object] = {
        "centroids_KP": rng.standard_normal((4, 6)).astype(np.float32),
        "sizes_K": np.array([5, 0, 2, 9], np.int64),
        "objective_I": np.array([1.5, 1.25, 1.125]),
        "surrogate_fingerprint": "abc",
        "surrogate_state": {
            "weights": rng.random(10).astype(np.float32),
            "map": rng.random((3, 2)).astype(np.float32),
        },
        "settings": {"seed": 3, "num_clusters": None},
    }
    return Clusters(**(chosen | changes))  # type: ignore[arg-type]


def context(**changes: object) -> ContextSet:
    chosen: dict[str, object] = {
        "doc_ids": ("a", "b", "ü"),
        "content_sha256s": ("1" * 64, "2" * 64, "3" * 64),
        "cluster_ids_C": np.array([0, 0, 4], np.int32),
        "embeddings_CD": np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32) * 7,
        "first_stage_fingerprint": "first",
    }
    return ContextSet(**(chosen | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [clusters, context])
def test_file_read_back_is_what_was_written_and_written_again_has_its_bytes(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    make().write(tmp_path / "a.arrow")
    back = make().read(tmp_path / "a.arrow")
    for field in fields(back):
        np.testing.assert_equal(getattr(back, field.name), getattr(make(), field.name))
    back.write(tmp_path / "b.arrow")
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (clusters, {"centroids_KP": np.zeros((4, 6), np.float32)}),
        (clusters, {"sizes_K": np.array([5, 0, 3, 9], np.int64)}),
        (clusters, {"surrogate_fingerprint": "abd"}),
        (clusters, {"surrogate_state": {}}),
        (clusters, {"settings": {"seed": 4, "num_clusters": None}}),
        (context, {"doc_ids": ("b", "a", "ü")}),
        (context, {"content_sha256s": ("1" * 64, "2" * 64, "4" * 64)}),
        (context, {"cluster_ids_C": np.array([0, 1, 4], np.int32)}),
        (context, {"embeddings_CD": np.zeros((3, 5), np.float32)}),
        (context, {"first_stage_fingerprint": "second"}),
    ],
)
def test_fingerprint_changes_with_every_part(make: Callable[..., Any], change: dict[str, object]) -> None:
    assert make(**change).fingerprint != make().fingerprint


@pytest.mark.parametrize("make", [clusters, context])
def test_file_with_any_byte_flipped_is_refused_or_unchanged(make: Callable[..., Any], tmp_path: Path) -> None:
    path, expected = tmp_path / "file.arrow", make().fingerprint
    make().write(path)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        try:
            assert make().read(path).fingerprint == expected
        except DamageError:
            refused += 1
    assert refused > len(content) // 20


@pytest.mark.parametrize("make", [clusters, context])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"kind": "cairn.other"}, "must be of kind"), ({}, "must hold .*, got other arrays")],
)
def test_arrow_file_of_another_kind_or_of_other_arrays_is_refused(
    make: Callable[..., Any], change: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    kind = {"kind": f"cairn.{'context' if make is context else 'clusters'}"}
    write_arrow_file(tmp_path / "file.arrow", {"x": np.ones(1)}, facts={}, **{**kind, **change})
    with pytest.raises(DamageError, match=sentence):
        make().read(tmp_path / "file.arrow")
    with pytest.raises(DamageError, match="must exist"):
        make().read(tmp_path / "clusters.arrow")


@pytest.mark.parametrize(
    ("embeddings", "sentence"),
    [
        (np.ones((2, 5), np.float32), "an embedding for each document"),
        (np.ones((3, 5)), "finite float32 rows"),
        (np.full((3, 7), np.nan, np.float32), "finite float32 rows, got others, such as"),
        (np.full((3, 7), np.inf, np.float32), "finite float32 rows"),
    ],
)
def test_embeddings_must_be_finite_and_one_a_document(embeddings: np.ndarray, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        context(embeddings_CD=embeddings)


def sample(num_documents: int = 50) -> tuple[pa.Table, np.ndarray]:
    rows = range(num_documents)
    table = pa.table(
        {
            "doc_id": [f"doc-{row}" for row in rows],
            "text": pa.array([str(row) for row in rows], pa.large_string()),
            "content_sha256": [f"{row:064d}" for row in rows],
        }
    )
    return table, (np.arange(num_documents) % 3).astype(np.int32)


def test_build_context_embeds_in_one_call_each_document_in_its_place() -> None:
    calls: list[int] = []

    def embed(texts: list[str]) -> np.ndarray:
        calls.append(len(texts))
        return np.array([[float(text), 3.0] for text in texts], np.float32)

    table, clusters_N = sample()
    found = build_context(table, clusters_N, ContextConfig(context_documents=12), embed, "first")
    assert calls == [12]
    rows = [int(doc_id.removeprefix("doc-")) for doc_id in found.doc_ids]
    assert found.embeddings_CD[:, 0].tolist() == rows
    assert found.content_sha256s == tuple(f"{row:064d}" for row in rows)
    assert found.cluster_ids_C.tolist() == clusters_N[rows].tolist()
    with pytest.raises(SourceError, match="at least one document"):
        build_context(*sample(0), ContextConfig(), embed, "first")


pairs = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)), min_size=1, max_size=20).filter(
    lambda rows: sum(a for a, _ in rows) > 0 and sum(b for _, b in rows) > 0
)


@given(pairs)
def test_measure_drift_equals_the_naive_distance(rows: list[tuple[int, int]]) -> None:
    before, now = [a for a, _ in rows], [b for _, b in rows]
    p, q = [a / sum(before) for a in before], [b / sum(now) for b in now]
    drift = measure_drift(before, now, sum(before))
    assert drift.total_variation == pytest.approx(
        sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, abs=1e-12
    )


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([520, 480], "none"),
        ([560, 440], "slight"),
        ([690, 310], "slight"),
        ([710, 290], "re-contextualise"),
        ([1_200, 1_200], "re-contextualise"),
    ],
)
def test_measure_drift_verdict_follows_distance_and_growth(now: list[int], verdict: str) -> None:
    assert measure_drift([500, 500], now, 1_000).verdict == verdict


def test_measure_drift_names_the_clusters_that_moved_most_and_takes_no_other_clusters() -> None:
    assert measure_drift([25, 25, 25, 25], [25, 45, 15, 15], 100).changed_clusters == (1, 2, 3)
    assert measure_drift([50, 50], [10, 10], 100).added_share == 0.0
    assert measure_drift([5, 5], [0, 0], 10).verdict == "none"
    with pytest.raises(FingerprintMismatchError, match="2 and 3"):
        measure_drift([1, 2], [1, 2, 3], 3)
