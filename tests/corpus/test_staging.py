from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.quarantine import RowWriter
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.corpus.source_record import create_record
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.corpus.staging import Staged, stage_changes
from cairn.pipeline.types import staged_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.test_poison_rows import expected_reason

WriteCorpus = Callable[..., Path]
Shas = dict[str, str]
CONFIG = CorpusConfig()


class Run:
    """One pass of stage 1 into a folder, with what is known from runs before."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        *,
        config: CorpusConfig = CONFIG,
        shard_characters: int = 1_000,
        published: Shas | None = None,
        encoded: Shas | None = None,
    ) -> None:
        scan = scan_sources([str(source)], config)
        (folder / "quarantine.parquet").unlink(missing_ok=True)
        create_record(folder / "sources.sqlite", "", [([*(published or {})], [*(published or {}).values()])])
        with (
            Ledger(folder / "ledger.sqlite", folder / "sources.sqlite") as ledger,
            RowWriter(folder / "quarantine.parquet") as quarantine,
        ):
            if encoded:
                ledger.load_encoded(0, [*encoded], [*encoded.values()])
            self.staged: Staged = stage_changes(
                scan, config, ledger, folder / "staged", shard_characters, quarantine
            )
            self.replaced = [doc_id for batch in ledger.replaced_ids() for doc_id in batch]
            self.vanished = [doc_id for batch in ledger.vanished_ids() for doc_id in batch]
        self.tables = [pq.read_table(path) for path in self.staged.shards]
        self.rows: list[dict[str, Any]] = [row for table in self.tables for row in table.to_pylist()]
        self.shas = {row["doc_id"]: row["content_sha256"] for row in self.rows}
        path = folder / "quarantine.parquet"
        self.quarantined: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []


def counts(staged: Staged) -> tuple[int, int, int, int, int, int]:
    return (
        staged.rows,
        staged.new,
        staged.changed,
        staged.unchanged,
        staged.already_encoded,
        staged.quarantined,
    )


def test_resumed_run_does_not_stage_what_lies_encoded(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    source = write_corpus(id=["b", "a"], text=["y", "x"], year=[1, 2])
    first = Run(tmp_path, source)
    second = Run(tmp_path, source, encoded={"a": first.shas["a"]})
    assert [row["doc_id"] for row in second.rows] == ["b"]
    assert counts(second.staged) == (2, 1, 0, 0, 1, 0)
    assert second.staged.indexed == 2
    assert (second.staged.characters, [row["year"] for row in second.rows]) == (1, [1])
    assert second.tables[0].schema == staged_schema([pa.field("year", pa.int64())])


def test_damaged_file_counts_as_one_row_and_makes_the_pass_incomplete(
    tmp_path: Path, write_corpus: WriteCorpus
) -> None:
    source = write_corpus("a.parquet", id=["a"], text=["x"]).parent
    assert Run(tmp_path, source).staged.is_complete
    (source / "b.parquet").write_bytes(b"not parquet")
    run = Run(tmp_path, source)
    assert counts(run.staged) == (2, 1, 0, 0, 0, 1)
    assert run.staged.quarantine_reasons == {"damaged_file": 1}
    assert not run.staged.is_complete


def test_older_shards_are_removed(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "000007.parquet").write_bytes(b"old")
    run = Run(tmp_path, write_corpus(id=["a"], text=["x"]))
    assert (
        [*(tmp_path / "staged").iterdir()] == [*run.staged.shards] == [tmp_path / "staged" / "000000.parquet"]
    )


@pytest.mark.parametrize(
    "config", [CorpusConfig(batch_rows=1), CorpusConfig(batch_rows=7, batch_bytes=100), CONFIG]
)
def test_shard_is_closed_by_the_row_that_fills_it_however_the_source_is_batched(
    tmp_path: Path, write_corpus: WriteCorpus, config: CorpusConfig
) -> None:
    sizes = [60, 60, 100, 5, 5, 300, 1, 99, 7]
    run = Run(
        tmp_path,
        write_corpus(id=[*range(9)], text=["x" * size for size in sizes]),
        config=config,
        shard_characters=100,
    )
    assert [[len(text) for text in table.column("text").to_pylist()] for table in run.tables] == [
        [60, 60],
        [100],
        [5, 5, 300],
        [1, 99],
        [7],
    ]


def test_shards_are_the_same_bytes_for_the_same_rows_however_they_are_cut_and_read(
    tmp_path: Path, write_corpus: WriteCorpus
) -> None:
    columns = {"id": [*range(500)], "text": [f"text {i}" for i in range(500)], "year": [*range(500)]}
    shards = list[list[bytes]]()
    for row_group_size, batch_rows in ((500, 1_024), (7, 3)):
        source = write_corpus(**columns, options={"row_group_size": row_group_size})
        run = Run(tmp_path / str(batch_rows), source, config=CorpusConfig(batch_rows=batch_rows))
        shards.append([path.read_bytes() for path in run.staged.shards])
    assert shards[0] == shards[1]
    assert len(shards[0]) > 1


def test_rows_of_a_shard_are_bounded(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    source = write_corpus(id=[*range(20_000)], text=["x"] * 20_000)
    run = Run(tmp_path, source, config=CorpusConfig(batch_rows=3_000), shard_characters=1 << 22)
    assert [pq.read_metadata(path).num_rows for path in run.staged.shards] == [8_192, 8_192, 3_616]


def test_given_vectors_fill_a_shard_as_text_does(tmp_path: Path) -> None:
    vectors = pa.array([[1.0] * 1_600] * 4, pa.list_(pa.float32(), 1_600))  # 6,400 bytes: 100 characters
    table = pa.table({"id": ["a", "b", "c", "d"], "text": ["x"] * 4, "v": vectors})
    config = CorpusConfig(vector_column="v")
    scan = replace(scan_sources([TableSource(table=table, name="t")], config), vector_dim=1_600)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        staged = stage_changes(scan, config, ledger, tmp_path / "staged", shard_characters=200)
    assert [pq.read_metadata(path).num_rows for path in staged.shards] == [2, 2]


corpus_rows = st.lists(
    st.tuples(st.sampled_from([None, "", "a", "b", "c", "d\0"]), st.sampled_from([None, " ", "1", "2"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(corpus_rows, corpus_rows, st.integers(0, 6), st.integers(1, 4))
def test_two_runs_and_their_plans_count_and_stage_what_is_new_or_changed_and_refuse_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[tuple[str | None, str | None]],
    second: list[tuple[str | None, str | None]],
    cut: int,
    batch_rows: int,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "equation"
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    config = CorpusConfig(batch_rows=batch_rows)
    published, known = dict[str, str](), dict[str, str]()
    for rows in (first, second):
        places = list[tuple[str, int]]()
        for name, own in (("a", rows[:cut]), ("b", rows[cut:])):
            path = folder / "corpus" / f"{name}.parquet"
            columns = {column: [row[place] for row in own] for place, column in enumerate(("id", "text"))}
            pq.write_table(pa.table(columns, pa.schema([("id", pa.string()), ("text", pa.string())])), path)
            places += [(str(path), place) for place in range(len(own))]
        run = Run(folder, folder / "corpus", config=config, published=published)
        good, refused = dict[str, str](), list[tuple[str, int, str | None, str]]()
        for place, (doc_id, text) in zip(places, rows, strict=True):
            reason = expected_reason(*(None if value is None else value.encode() for value in (doc_id, text)))
            if reason or doc_id in good:
                shown = doc_id and doc_id.replace("\0", "\ufffd")
                refused.append((*place, shown, reason or "duplicate_id"))
            elif doc_id and text:
                good[doc_id] = text
        new = [doc_id for doc_id in good if doc_id not in known]
        changed = [doc_id for doc_id in good if known.get(doc_id, good[doc_id]) != good[doc_id]]
        unchanged = len(good) - len(new) - len(changed)
        assert counts(run.staged) == (len(rows), len(new), len(changed), unchanged, 0, len(refused))
        staged = [(doc_id, text) for doc_id, text in good.items() if doc_id in new + changed]
        assert [(row["doc_id"], row["text"]) for row in run.rows] == staged
        names = ("source_file", "row_index", "doc_id", "reason")
        assert sorted(tuple(row[name] for name in names) for row in run.quarantined) == sorted(refused)
        # A document whose new version is bad has not vanished.
        assert (run.replaced, run.vanished) == (
            sorted(changed),
            sorted(known.keys() - {row[0] for row in rows}),
        )
        before = sorted(folder.rglob("*"))
        with Ledger(folder / "ledger.sqlite", folder / "sources.sqlite") as ledger:
            planned = stage_changes(scan_sources([str(folder / "corpus")], config), config, ledger)
        assert asdict(planned) == {**asdict(run.staged), "shards": ()}
        assert sorted(folder.rglob("*")) == before, "a plan writes nothing"
        published, known = {**published, **run.shas}, {**known, **good}


@pytest.mark.parametrize("num_files", [1, 20, 22])
def test_a_warning_names_up_to_twenty_files_whose_encoding_is_a_guess(tmp_path: Path, num_files: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(num_files):
        (source / f"{number:02}.txt").write_bytes(f"Größe {number}".encode("cp1252"))
    (told,) = Run(tmp_path, source).staged.warnings
    named = [number for number in range(num_files) if f"{number:02}.txt" in told]
    assert named == [*range(min(num_files, 20))]
    assert (" and 2 more" in told) == (num_files == 22)
