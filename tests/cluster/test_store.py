from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.cluster.arrow_file import write_arrow_file
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.errors import IntegrityError


def clusters(**changes: object) -> Clusters:
    rng = np.random.default_rng(1)
    fields: dict[str, object] = {
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
    return Clusters(**(fields | changes))  # type: ignore[arg-type]


def test_clusters_read_back_are_bit_equal(tmp_path: Path) -> None:
    clusters().write(tmp_path / "clusters.arrow")
    back = Clusters.read(tmp_path / "clusters.arrow")
    assert back.centroids_KP.tobytes() == clusters().centroids_KP.tobytes()
    assert back.sizes_K.tolist() == [5, 0, 2, 9]
    assert back.objective_I.tolist() == [1.5, 1.25, 1.125]
    assert back.surrogate_state["map"].shape == (3, 2)
    assert back.settings == {"seed": 3, "num_clusters": None}
    assert back.fingerprint == clusters().fingerprint


def test_clusters_written_twice_have_equal_bytes(tmp_path: Path) -> None:
    clusters().write(tmp_path / "a.arrow")
    Clusters.read(tmp_path / "a.arrow").write(tmp_path / "b.arrow")
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"centroids_KP": np.zeros((4, 6), np.float32)},
        {"sizes_K": np.array([5, 0, 3, 9], np.int64)},
        {"surrogate_fingerprint": "abd"},
        {"surrogate_state": {}},
        {"settings": {"seed": 4, "num_clusters": None}},
    ],
)
def test_fingerprint_changes_with_every_part(change: dict[str, object]) -> None:
    assert clusters(**change).fingerprint != clusters().fingerprint


def test_clusters_with_any_byte_flipped_are_refused_or_unchanged(tmp_path: Path) -> None:
    path, expected = tmp_path / "clusters.arrow", clusters().fingerprint
    clusters().write(path)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        try:
            assert Clusters.read(path).fingerprint == expected
        except IntegrityError:
            refused += 1
    assert refused > len(content) // 20


def test_missing_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="must exist"):
        Clusters.read(tmp_path / "clusters.arrow")


def test_an_arrow_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_arrow_file(tmp_path / "clusters.arrow", pa.table({"x": [1]}), kind="cairn.other", header={})
    with pytest.raises(IntegrityError, match="another table"):
        Clusters.read(tmp_path / "clusters.arrow")


def test_clusters_with_an_array_missing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clusters.arrow"
    clusters().write(path)
    with pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    write_arrow_file(
        path, table.slice(1).replace_schema_metadata(None), kind="cairn.clusters", header={"fingerprint": "x"}
    )
    with pytest.raises(IntegrityError, match="must hold clusters"):
        Clusters.read(path)
