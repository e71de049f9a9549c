from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from cairn.pipeline.errors import CollectionBusyError, CollectionNotFoundError, IntegrityError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, delete_documents
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.status import collection_status
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.manifest import Manifest

from tests.index import stones

Verb = Callable[[CollectionLayout], object]


def test_delete_of_any_number_of_ids_removes_them_and_keeps_what_the_context_says(
    published: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.rows.MAX_IDS_A_DELETE", 3)
    before = open_generation(published).manifest
    assert delete_documents(published, ["nowhere"]).generation == 1
    assert delete_documents(published, stones.document_ids(20)[:10]).deleted == 10
    after = open_generation(published)
    assert after.doc_ids.to_pylist() == stones.document_ids(20)[10:]
    assert after.manifest.fingerprints == before.fingerprints
    assert after.manifest.files["context.arrow"] == before.files["context.arrow"]
    assert after.manifest.context_cluster_sizes == before.context_cluster_sizes


def test_compaction_under_an_old_reader_leaves_it_its_generation(published: CollectionLayout) -> None:
    reader = open_generation(published)
    compact_collection(published)
    rows = reader.fetch_documents(range(reader.num_documents), ["doc_id", "text"])
    ids = stones.document_ids(20)
    assert rows.column("doc_id").to_pylist() == ids
    assert rows.column("text").to_pylist() == [stones.text_of(doc_id) for doc_id in ids]


def test_status_is_json_and_counts(published: CollectionLayout) -> None:
    status = json.loads(json.dumps(collection_status(published)))
    assert (status["documents"], status["generation"], status["vector_dim"]) == (20, 1, 16)
    assert sum(status["cluster_sizes"]) == 20
    assert status["context"]["cluster_sizes"] == [1, 1]
    assert status["indexes"]["chunks"]["kind"] == "flat"
    assert [segment["documents"] for segment in status["segments"]] == [20]
    assert status["disk_bytes"] > 10_000


@pytest.mark.parametrize(
    "verb", [collection_status, compact_collection, repair_collection, verify_collection]
)
def test_verbs_on_an_unknown_collection_are_refused(layout: CollectionLayout, verb: Verb) -> None:
    with pytest.raises(CollectionNotFoundError):
        verb(layout)
    assert not layout.folder.exists()


@pytest.mark.parametrize("verb", [compact_collection, repair_collection])
def test_writing_verbs_under_another_writer_are_busy(published: CollectionLayout, verb: Verb) -> None:
    with published.writer_lock(), pytest.raises(CollectionBusyError):
        verb(published)


@pytest.mark.parametrize(
    "verb", [collection_status, compact_collection, repair_collection, verify_collection]
)
def test_collection_of_another_release_is_no_damage(
    published: CollectionLayout, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    current = published.current_path.read_bytes()
    monkeypatch.setattr("cairn.pipeline.manifest.TOKENIZER_VERSION", 99)
    Manifest.of.cache_clear()
    with pytest.raises(IntegrityError, match=r"^MANIFEST.json .* another release .* into a new collection$"):
        verb(published)
    assert published.current_path.read_bytes() == current
