from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.corpus.staging import Staged, stage_changes
from cairn.pipeline.types import staged_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.published import Published
from tests.corpus.test_poison_rows import expected_reason

WriteCorpus = Callable[..., Path]
CONFIG = CorpusConfig()


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "work", reread=True)


def counts(staged: Staged) -> tuple[int, int, int, int, int, int]:
    return (
        staged.rows,
        staged.new,
        staged.changed,
        staged.unchanged,
        staged.already_encoded,
        staged.quarantined,
    )


def test_resumed_run_does_not_stage_what_lies_encoded(
    published: Published, write_corpus: WriteCorpus
) -> None:
    source = write_corpus(id=["b", "a"], text=["y", "x"], year=[1, 2])
    _, first = published.ingest(source, killed="early")["staged_rows"]
    done = published.ingest(source, encoded={"a": first["content_sha256"]})
    assert [(row["doc_id"], row["year"]) for row in done["staged_rows"]] == [("b", 1)]
    assert counts(published.staged) == (2, 1, 0, 0, 1, 0)
    assert (published.staged.indexed, published.staged.characters) == (2, 1)
    assert pq.read_schema(published.staged.shards[0]) == staged_schema([pa.field("year", pa.int64())])


def test_duplicates_keep_the_first_row_and_say_where_the_others_are(
    published: Published, write_corpus: WriteCorpus
) -> None:
    first = write_corpus("a.parquet", id=["a", None, "a", "b"], text=["first", "x", "second", "y"])
    second = write_corpus("b.parquet", id=["b"], text=["z"])
    done = published.ingest(first.parent)
    assert [(row["doc_id"], row["text"]) for row in done["staged_rows"]] == [("a", "first"), ("b", "y")]
    names = ("source_file", "row_index", "doc_id", "reason")
    assert sorted(tuple(map(row.get, names)) for row in done["refused"]) == [
        (str(first), 1, None, "null_id"),
        (str(first), 2, "a", "duplicate_id"),
        (str(second), 0, "b", "duplicate_id"),
    ]


def test_damaged_file_counts_as_one_row_and_makes_the_pass_incomplete(
    published: Published, write_corpus: WriteCorpus
) -> None:
    source = write_corpus("a.parquet", id=["a"], text=["x"]).parent
    assert published.ingest(source)["is_complete"]
    (source / "b.parquet").write_bytes(b"not parquet")
    done = published.ingest(source)
    assert counts(published.staged) == (2, 0, 0, 1, 0, 1)
    assert (done["quarantine_reasons"], done["is_complete"]) == ({"damaged_file": 1}, False)


def test_older_shards_are_removed(published: Published, write_corpus: WriteCorpus) -> None:
    folder = published.folder / "staged"
    folder.mkdir()
    (folder / "000007.parquet").write_bytes(b"old")
    published.ingest(write_corpus(id=["a"], text=["x"]))
    assert [*folder.iterdir()] == [*published.staged.shards] == [folder / "000000.parquet"]


@pytest.mark.parametrize(
    "config", [CorpusConfig(batch_rows=1), CorpusConfig(batch_rows=7, batch_bytes=100), CONFIG]
)
def test_shard_is_closed_by_the_row_that_fills_it_however_the_source_is_batched(
    published: Published, write_corpus: WriteCorpus, config: CorpusConfig
) -> None:
    sizes = [60, 60, 100, 5, 5, 300, 1, 99, 7]
    source = write_corpus(id=[*range(9)], text=["x" * size for size in sizes])
    published.ingest(source, config=config, shard_characters=100)
    shards = [pq.read_table(path).column("text").to_pylist() for path in published.staged.shards]
    assert [[*map(len, texts)] for texts in shards] == [[60, 60], [100], [5, 5, 300], [1, 99], [7]]


def test_shards_are_the_same_bytes_for_the_same_rows_however_they_are_cut_and_read(
    published: Published, write_corpus: WriteCorpus
) -> None:
    columns = {"id": [*range(500)], "text": [f"text {i}" for i in range(500)], "year": [*range(500)]}
    shards = list[list[bytes]]()
    for row_group_size, batch_rows in ((500, 1_024), (7, 3)):
        source = write_corpus(**columns, options={"row_group_size": row_group_size})
        published.ingest(source, killed="early", config=CorpusConfig(batch_rows=batch_rows))
        shards.append([path.read_bytes() for path in published.staged.shards])
    assert shards[0] == shards[1]
    assert len(shards[0]) > 1


def test_rows_of_a_shard_are_bounded(published: Published, write_corpus: WriteCorpus) -> None:
    source = write_corpus(id=[*range(20_000)], text=["x"] * 20_000)
    published.ingest(source, config=CorpusConfig(batch_rows=3_000), shard_characters=1 << 22)
    shards = published.staged.shards
    assert [pq.read_metadata(path).num_rows for path in shards] == [8_192, 8_192, 3_616]


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
    published, known = Published(folder, reread=True), dict[str, str]()
    for rows in (first, second):
        places = list[tuple[str, int]]()
        for name, own in (("a", rows[:cut]), ("b", rows[cut:])):
            path = folder / "corpus" / f"{name}.parquet"
            columns = {column: [row[place] for row in own] for place, column in enumerate(("id", "text"))}
            pq.write_table(pa.table(columns, pa.schema([("id", pa.string()), ("text", pa.string())])), path)
            places += [(str(path), place) for place in range(len(own))]
        done = published.ingest(folder / "corpus", killed="early", config=config)
        run = published.staged
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
        assert counts(run) == (len(rows), len(new), len(changed), unchanged, 0, len(refused))
        staged = [(doc_id, text) for doc_id, text in good.items() if doc_id in new + changed]
        assert [(row["doc_id"], row["text"]) for row in done["staged_rows"]] == staged
        names = ("source_file", "row_index", "doc_id", "reason")
        assert sorted(tuple(map(row.get, names)) for row in done["refused"]) == sorted(refused)
        # A document whose new version is bad has not vanished.
        vanished = known.keys() - {doc_id for doc_id, _ in rows}
        assert (done["replaced"], done["vanished"]) == (sorted(changed), sorted(vanished))
        before = sorted(folder.rglob("*"))
        with Ledger(folder / "ledger.sqlite", folder / "sources.sqlite") as ledger:
            planned = stage_changes(scan_sources([str(folder / "corpus")], config), config, ledger)
        assert asdict(planned) == {**asdict(run), "shards": ()}
        assert sorted(folder.rglob("*")) == before, "a plan writes nothing"
        published.ingest(folder / "corpus", config=config)
        known |= good


@pytest.mark.parametrize("num_files", [1, 20, 22])
def test_a_warning_names_up_to_twenty_files_whose_encoding_is_a_guess(
    published: Published, tmp_path: Path, num_files: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(num_files):
        (source / f"{number:02}.txt").write_bytes(f"Größe {number}".encode("cp1252"))
    (told,) = published.ingest(source)["warnings"]
    named = [number for number in range(num_files) if f"{number:02}.txt" in told]
    assert named == [*range(min(num_files, 20))]
    assert (" and 2 more" in told) == (num_files == 22)
