"""Corpora in an object store: found, read, and never taken for damaged because the store does not answer."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.file_identity import file_identities
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SourceError, TryAgainError

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

CONFIG = CorpusConfig(batch_rows=64)


def parquet(first: int, rows: int = 300) -> bytes:
    texts = [
        np.random.default_rng(number).bytes(400).hex() for number in range(first, first + rows)
    ]  # more than is read ahead
    content = io.BytesIO()
    pq.write_table(
        pa.table({"id": [f"d{number}" for number in range(first, first + rows)], "text": texts}),
        content,
        row_group_size=50,
    )
    return content.getvalue()


@pytest.fixture
def articles(object_store: ObjectStore) -> ObjectStore:
    for name, first in (
        ("year=2020/a.parquet", 0),
        ("year=2021/b.parquet", 300),
        ("_unfinished/c.parquet", 600),
    ):
        object_store.put(f"articles/{name}", parquet(first))
    return object_store


@pytest.mark.parametrize(
    "source", ["s3://cairn/articles", "s3://cairn/articles/", "s3://cairn/articles/*/*.parquet", "s3://cairn"]
)
def test_folder_and_glob_of_a_bucket_are_found_with_their_partitions(
    articles: ObjectStore, source: str
) -> None:
    files = resolve_sources([source])
    assert [(file.name[-19:], file.partitions) for file in files] == [
        ("year=2020/a.parquet", (("year", "2020"),)),
        ("year=2021/b.parquet", (("year", "2021"),)),
    ]


def test_every_row_of_a_bucket_is_read_though_the_store_refuses_at_times(articles: ObjectStore) -> None:
    articles.fault("GET", "parquet", "refuse", times=2)
    scan = scan_sources(["s3://cairn/articles"], CONFIG)
    articles.fault("GET", "parquet", "lose-reply", times=2)
    ids = [
        doc_id for batch in read_checked(scan, CONFIG) for doc_id in batch.rows.column("doc_id").to_pylist()
    ]
    assert ids == [f"d{number}" for number in range(600)]


def test_store_that_dies_while_it_is_read_quarantines_nothing_and_says_to_try_again(
    articles: ObjectStore,
) -> None:
    batches = read_checked(scan_sources(["s3://cairn/articles"], CONFIG), CONFIG)
    next(batches)
    articles.kill()
    with pytest.raises(
        TryAgainError, match=r"the store of source s3://cairn/articles/.* does not answer"
    ) as caught:
        list(batches)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s3://cairn/gone", "source s3://cairn/gone does not exist"),
        ("s3://nobody/articles", "source s3://nobody/articles does not exist"),
        ("s3://", "must name a bucket; write s3://BUCKET/FOLDER"),
        ("s3:///articles", "must name a bucket"),
    ],
)
def test_source_that_is_not_in_a_bucket_is_one_sentence(
    articles: ObjectStore, source: str, words: str
) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        resolve_sources([source])
    assert "\n" not in str(caught.value)


def test_identity_of_an_object_changes_with_its_content_alone(articles: ObjectStore) -> None:
    def identities() -> list[str | None]:
        return file_identities(resolve_sources(["s3://cairn/articles"]))

    before = identities()
    assert None not in before
    articles.put("articles/year=2020/a.parquet", parquet(0))
    assert identities() == before
    articles.put("articles/year=2020/a.parquet", parquet(1))
    assert [now == then for now, then in zip(identities(), before, strict=True)] == [False, True]
