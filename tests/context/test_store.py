"""Clusters and context as the files of a collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.cluster.arrow_file import write_arrow_file
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.errors import DamageError, ModelError, SourceError


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
