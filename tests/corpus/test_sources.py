from collections import Counter
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SourceError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"PAR1")


def relative(folder: Path, sources: list[str]) -> list[str]:
    return [str(Path(file.path).relative_to(folder)) for file in resolve_sources(sources)]


def test_folder_is_searched_recursively_and_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.parquet", "a.pq", "sub/deep/c.PARQUET", "notes.txt")
    assert relative(tmp_path, [str(tmp_path)]) == ["a.pq", "b.parquet", "sub/deep/c.PARQUET"]


def test_files_of_other_kinds_are_counted_by_their_suffix(tmp_path: Path) -> None:
    touch(tmp_path / "mixed", "a.parquet", "b.md", "sub/c.md", "d.pdf", ".hidden.pdf", "LICENSE")
    touch(tmp_path / "dataset", "data.arrow", "dataset_info.json", "state.json", "cache-1.arrow")
    unread = Counter[str]()
    resolve_sources([str(tmp_path / "mixed"), str(tmp_path / "dataset")], unread)
    assert unread == {".md": 2, ".pdf": 1, "LICENSE": 1}
    resolve_sources([str(tmp_path / "mixed" / "b.md"), f"{tmp_path}/mixed/*.parquet"], unread)
    assert unread.total() == 4


def test_folder_hidden_and_underscored_names_are_skipped(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", ".b.parquet", "_c.parquet", "_temporary/d.parquet", ".git/e.parquet")
    assert relative(tmp_path, [str(tmp_path)]) == ["a.parquet"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["a.parquet"]),
        ("*", ["a.parquet", "x/b.parquet", "x/y/c.parquet"]),
        ("x/*.parquet", ["x/b.parquet"]),
        ("**/*.parquet", ["a.parquet", "x/b.parquet", "x/y/c.parquet"]),
        ("**/[bc].parquet", ["x/b.parquet", "x/y/c.parquet"]),
        ("?/y", ["x/y/c.parquet"]),
        ("**", ["a.parquet", "x/b.parquet", "x/y/c.parquet"]),
    ],
)
def test_glob_matches_like_a_shell(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    touch(tmp_path, "a.parquet", "x/b.parquet", "x/y/c.parquet", "x/.hidden.parquet", "notes.txt")
    assert relative(tmp_path, [f"{tmp_path}/{pattern}"]) == expected


def test_name_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    touch(tmp_path, "[draft] a.parquet")
    assert relative(tmp_path, [str(tmp_path / "[draft] a.parquet")]) == ["[draft] a.parquet"]


def test_named_file_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "export.data")
    assert relative(tmp_path, [str(tmp_path / "export.data")]) == ["export.data"]


def test_overlapping_sources_give_each_file_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.parquet")
    sources = [
        str(tmp_path / "b.parquet"),
        str(tmp_path),
        f"{tmp_path}/*.parquet",
        f"file://{tmp_path}/a.parquet",
    ]
    assert relative(tmp_path, sources) == ["a.parquet", "b.parquet"]


def test_order_of_sources_does_not_matter(tmp_path: Path) -> None:
    touch(tmp_path, "x/a.parquet", "y/b.parquet")
    forward, backward = [f"{tmp_path}/x", f"{tmp_path}/y"], [f"{tmp_path}/y", f"{tmp_path}/x"]
    assert [file.path for file in resolve_sources(forward)] == [
        file.path for file in resolve_sources(backward)
    ]


def test_name_keeps_what_the_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "docs/sub/a.parquet")
    monkeypatch.chdir(tmp_path)
    names = {
        source: resolve_sources([source])[0].name
        for source in ("docs", "docs/sub/a.parquet", "docs/*/a.parquet", "./docs/")
    }
    assert names == {
        "docs": "docs/sub/a.parquet",
        "docs/sub/a.parquet": "docs/sub/a.parquet",
        "docs/*/a.parquet": "docs/sub/a.parquet",
        "./docs/": "./docs/sub/a.parquet",
    }


def test_relative_glob_is_resolved_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert relative(tmp_path, ["*.parquet"]) == ["a.parquet"]


def test_hive_folders_become_partition_values(tmp_path: Path) -> None:
    touch(tmp_path, "lang=de/year=2024/a.parquet", "lang=f%20r/year=__HIVE_DEFAULT_PARTITION__/b.parquet")
    assert [file.partitions for file in resolve_sources([str(tmp_path)])] == [
        (("lang", "de"), ("year", "2024")),
        (("lang", "f r"), ("year", None)),
    ]


def test_hive_folder_given_as_source_is_not_a_partition(tmp_path: Path) -> None:
    touch(tmp_path, "lang=de/year=2024/a.parquet")
    assert resolve_sources([str(tmp_path / "lang=de")])[0].partitions == (("year", "2024"),)


def test_file_uri_with_glob_is_listed(tmp_path: Path) -> None:
    touch(tmp_path, "x/a.parquet", "x/b.txt")
    assert relative(tmp_path, [f"file://{tmp_path}/*/*.parquet"]) == ["x/a.parquet"]


def test_fsspec_memory_folder_is_listed_and_opened() -> None:
    filesystem = fsspec.filesystem("memory")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": ["a"]}), sink)
    filesystem.pipe("/cairn-sources/part/a.parquet", sink.getvalue().to_pybytes())
    try:
        (file,) = resolve_sources(["memory://cairn-sources"])
        with file.open() as stream:
            assert pq.read_table(stream).to_pydict() == {"id": ["a"]}
        assert file.name == "memory://cairn-sources/part/a.parquet"
    finally:
        filesystem.rm("/cairn-sources", recursive=True)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("missing.parquet", "does not exist"),
        ("*.parquet", "no file that can be read"),
        ("", "must be a path"),
        ("nothing://x/y", "URI that Arrow or fsspec can open"),
        ("empty", "holds no file that can be read"),
        ("memory://not-there", "does not exist"),
    ],
)
def test_source_without_parquet_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=sentence) as caught:
        resolve_sources([source])
    assert "\n" not in str(caught.value)


def test_no_sources_at_all_is_refused() -> None:
    with pytest.raises(SourceError, match="at least one source"):
        resolve_sources([])


def test_error_about_uri_does_not_show_credentials() -> None:
    with pytest.raises(SourceError) as caught:
        resolve_sources(["nothing://user:secret@host/path"])
    assert "secret" not in str(caught.value)


def test_folder_that_links_into_itself_is_read_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "x/y/b.parquet")
    (tmp_path / "x/y/loop").symlink_to("../..")
    (tmp_path / "again").symlink_to("x")
    for source in (str(tmp_path), f"{tmp_path}/**/*.parquet"):
        assert relative(tmp_path, [source]) == ["a.parquet", "x/y/b.parquet"]


def test_folder_behind_a_link_is_read_under_the_name_of_the_link(tmp_path: Path) -> None:
    touch(tmp_path, "corpus/a.parquet", "elsewhere/b.parquet")
    (tmp_path / "corpus/linked").symlink_to("../elsewhere")
    assert relative(tmp_path, [str(tmp_path / "corpus")]) == ["corpus/a.parquet", "corpus/linked/b.parquet"]
