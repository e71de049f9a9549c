from collections import Counter
from pathlib import Path

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


def test_hive_folders_become_partition_values(tmp_path: Path) -> None:
    touch(tmp_path, "lang=de/year=2024/a.parquet", "lang=f%20r/year=__HIVE_DEFAULT_PARTITION__/b.parquet")
    assert [file.partitions for file in resolve_sources([str(tmp_path)])] == [
        (("lang", "de"), ("year", "2024")),
        (("lang", "f r"), ("year", None)),
    ]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("missing.parquet", "does not exist"),
        ("*.parquet", "no file that can be read"),
        ("", "must be a path"),
        ("nothing://x/y", "URI that Arrow or fsspec can open"),
        ("empty", "holds no file that can be read"),
        ("memory://not-there", "does not exist"),
        ("nothing://user:secret@host/path", "source nothing://host/path must be a URI"),
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
