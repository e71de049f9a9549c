"""The Ray engine against the local one, on a cluster of three machines: the same collection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from cairn.cli.cluster import open_engine
from cairn.jobs.engine import EngineConfig
from cairn.jobs.ray_cluster import engine as ray_engine
from cairn.jobs.ray_cluster import tasks
from cairn.jobs.ray_cluster.engine import RayEngine
from cairn.pipeline.config import IndexConfig, IngestConfig
from cairn.pipeline.encode.shards import write_encoded_shard
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line import encode as encode_corpus
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.engine import EncodedShard

from tests.small_ingests import WINDOWS, document, settings, write_rows
from tests.stored_collections import require_same, sorted_rows, stored

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def corpus(path: Path, numbers: range) -> str:
    return write_rows(path, [document(number) for number in numbers])


@pytest.fixture
def config(tiny_model_folder: Path) -> IngestConfig:
    return settings(
        tiny_model_folder,
        **WINDOWS,
        use_context=True,
        num_clusters=3,
        max_sample_documents=20,
        context_documents=8,
        shard_characters=600,
    )


@pytest.fixture
def engine(ray_cluster: Any) -> EngineConfig:
    return EngineConfig(name="ray", address=ray_cluster.address, max_workers=2)


def test_ray_engine_builds_the_collection_that_the_local_engine_builds(
    tmp_path: Path, config: IngestConfig, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first ingest, most of whose documents are not in the sample, and one that adds to it.

    Its workers see the driver's folder, those of the second do not.
    """
    reports, handed_over = {}, {0: set[bool](), 40: set[bool]()}

    def write(folder: Path, number: int, staged: Path, documents: Any, chunks: Any, **how: Any) -> None:
        handed_over[start] |= {isinstance(documents, Path), isinstance(chunks, Path)}
        write_encoded_shard(folder, number, staged, documents, chunks, **how)

    for start, end, workers in ((0, 60, 2), (40, 80, 1)):
        source = corpus(tmp_path / "a.parquet", range(start, end))
        reports["local", start] = build_index([source], tmp_path, "local", config)
        with monkeypatch.context() as patch:
            patch.setattr(encode_corpus, "write_encoded_shard", write)
            if start:
                patch.setattr(ray_engine, "_leave_mark", lambda _: "of another machine")
            some = replace(engine, max_workers=workers)
            reports["ray", start] = build_index(
                [source], tmp_path, "ray", config, engine=open_engine(some, config)
            )
    assert handed_over == {0: {True}, 40: {False}}
    for start in (0, 40):
        assert _counts(reports["ray", start]) == _counts(reports["local", start])
    require_same(stored(tmp_path, "ray"), stored(tmp_path, "local"))
    layout = CollectionLayout(tmp_path, "ray")
    assert verify_collection(layout) == []
    fingerprints = [
        open_generation(CollectionLayout(tmp_path, name)).manifest.fingerprints for name in ("local", "ray")
    ]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.slow
@pytest.mark.parametrize("is_seen", [True, False])
def test_partitions_that_workers_publish_are_those_of_the_local_engine(
    tmp_path: Path,
    config: IngestConfig,
    engine: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_seen: bool,
) -> None:
    """Workers that do not see the root leave its partitions to the driver."""
    if not is_seen:
        monkeypatch.setattr(tasks, "_leave_mark", lambda _: tmp_path / "elsewhere")
    caplog.set_level("INFO")
    config = replace(config, index=IndexConfig(partitions=3))
    source = corpus(tmp_path / "a.parquet", range(60))
    for name, chosen in (("ray", engine), ("local", None)):
        build_index([source], tmp_path, name, config, engine=chosen and open_engine(chosen, config))
    assert sorted_rows(tmp_path, "ray").equals(sorted_rows(tmp_path, "local"))
    assert ("no disk or store in common" in caplog.text) == (not is_seen)
    assert verify_collection(CollectionLayout(tmp_path, "ray")) == []


@pytest.mark.slow
def test_setting_the_model_has_no_room_for_is_refused_by_a_worker_before_anything_is_written(
    tmp_path: Path, config: IngestConfig, engine: EngineConfig
) -> None:
    source = corpus(tmp_path / "a.parquet", range(5))
    other = replace(config, encoder=replace(config.encoder, dims=33))
    one = replace(engine, max_workers=1)
    with pytest.raises(ConfigError, match="between 1 and the model's 32, got 33"):
        build_index([source], tmp_path / "root", "c", other, engine=open_engine(one, other))
    assert not (tmp_path / "root").exists()


def test_unchanged_ray_ingest_connects_to_nothing(tmp_path: Path, config: IngestConfig) -> None:
    source = corpus(tmp_path / "a.parquet", range(5))
    build_index([source], tmp_path, "c", config)
    nowhere = open_engine(EngineConfig(name="ray", address="nowhere.invalid:1"), config)
    report = build_index([source], tmp_path, "c", config, engine=nowhere)
    assert (report.unchanged, report.encoded) == (5, 0)


def _counts(report: Any) -> dict[str, int]:
    names = ("rows", "indexed", "unchanged", "quarantined", "deleted", "encoded", "chunks", "tokens")
    return {name: getattr(report, name) for name in names}


def test_shards_that_a_worker_does_not_see_are_sent_to_it(tmp_path: Path, config: IngestConfig) -> None:
    """Every other call meets a worker that does not see the driver's files."""
    (tmp_path / "staged").mkdir()
    shards = [tmp_path / "staged" / f"shard-{number}" for number in range(6)]
    for number, shard in enumerate(shards):
        shard.write_bytes(b"%d" % number)
    given, tokens = list[str | bytes](), list[int]()

    def answer(place: int, staged: str | bytes) -> EncodedShard | None:
        given.append(staged)
        if isinstance(staged, str) and place % 2:
            return None
        content = pa.py_buffer(staged if isinstance(staged, bytes) else shards[place].read_bytes())
        return EncodedShard(
            documents=content, chunks=content, num_documents=1, num_characters=1, num_tokens=len(content)
        )

    def answers(_: str, arguments: Any, sizes: Sequence[int], goes_again: Any) -> Iterator[tuple[int, Any]]:
        for place in range(len(sizes)):
            while goes_again(found := answer(place, *arguments(place))):
                pass
            yield place, found

    def hear(_: str, folder: Path, mark: str) -> None:
        assert (folder.with_name("handed-over") / mark).is_file()

    engine = RayEngine(EngineConfig(name="ray"), config)
    engine._pool = SimpleNamespace(step=hear, map=answers)  # type: ignore[assignment]
    found = {number: each.documents.to_pybytes() for number, each in engine.encode(shards, tokens.append)}
    assert found == {number: b"%d" % number for number in range(6)}
    assert given == [*(shard.name for shard in shards[:2]), *(found[number] for number in range(1, 6))]
    assert sum(tokens) == 6
