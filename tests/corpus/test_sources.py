import gzip
from pathlib import Path

import pytest
from cairn.pipeline.corpus.sources import OUTSIDE, BoundedSource, LeftOut, resolve_sources
from cairn.pipeline.errors import SourceError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"PAR1\x15")


def relative(folder: Path, sources: list[str]) -> list[str]:
    return [str(Path(file.path).relative_to(folder)) for file in resolve_sources(sources)]


def test_formats_stand_side_by_side_and_what_is_not_read_is_counted_by_its_reason(tmp_path: Path) -> None:
    touch(
        tmp_path / "mixed", "a.parquet", "b.md", "sub/c.MD", "d.png", "e.PNG", ".f.md", "LICENSE", ".git/g.md"
    )
    touch(tmp_path / "mixed", "~$b.md", "_index.md", "_posts/h.md", "_c.parquet", "_temporary/d.parquet")
    touch(tmp_path / "mixed", "node_modules/i/j.md", "data/c/CURRENT", "data/c/generations/1/x.parquet")
    touch(tmp_path / "mixed", "data/new/.lock", "data/new/pending/x.parquet")
    touch(tmp_path / "dataset", "data.arrow", "dataset_info.json", "state.json", "cache-1.arrow")
    left_out = LeftOut()
    found = resolve_sources([str(tmp_path / "mixed"), str(tmp_path / "dataset")], left_out)
    assert [str(Path(file.path).relative_to(tmp_path)) for file in found] == [
        "dataset/data.arrow",
        "mixed/_index.md",
        "mixed/_posts/h.md",
        "mixed/a.parquet",
        "mixed/b.md",
        "mixed/sub/c.MD",
    ]
    assert left_out.counts == {
        ".png": 2,
        "without a suffix": 1,
        "hidden": 3,
        "node_modules": 1,
        "collections of Cairn": 2,
        "tables in names that start with _": 2,
    }
    (warning,) = left_out.warnings()
    assert f"2 .png ({tmp_path}/mixed/d.png, {tmp_path}/mixed/e.PNG)" in warning
    assert "hidden" not in warning
    assert warning.startswith("left out: 2 tables in names that start with _ (")
    resolve_sources([str(tmp_path / "mixed" / "b.md"), f"{tmp_path}/mixed/*.parquet"], left_out)
    assert left_out.counts.total() == 12  # _c.parquet, which a glob names, too


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("root", r"holds no file that can be read \(.*; what it holds is never read: collections of Cairn$"),
        ("root/docs", "is of docs, a collection of Cairn, which is no source; name the files"),
        ("root/docs/origins", "is of docs, a collection of Cairn"),
        ("root/docs/*/*.parquet", "is of docs, a collection of Cairn"),
    ],
)
def test_what_is_of_a_collection_is_no_source_and_is_told_so(
    tmp_path: Path, source: str, sentence: str
) -> None:
    for folder in ("generations", "origins"):
        (tmp_path / "root" / "docs" / folder).mkdir(parents=True)
    (tmp_path / "root" / "docs" / "CURRENT").touch()
    (tmp_path / "root" / "docs" / "origins" / "a.parquet").touch()
    with pytest.raises(SourceError, match=sentence):
        resolve_sources([str(tmp_path / source)])


@pytest.mark.parametrize("name", ["data.json", "page.png", "notes.txt.gz"])
def test_a_named_file_of_another_kind_is_told_what_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[{}]")
    with pytest.raises(SourceError, match=r"must be of a kind that is read \(\.parquet, .*got \."):
        resolve_sources([str(tmp_path / name)])
    (tmp_path / name).write_bytes(gzip.compress(b"[{}]"))
    with pytest.raises(SourceError, match=r"got \..*; it is compressed by gzip, and not \..*: unpack it$"):
        resolve_sources([str(tmp_path / name)])


ALL = ["[draft] a.parquet", "a.parquet", "x/b.parquet", "x/y/c.parquet"]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["*.parquet"], ["[draft] a.parquet", "a.parquet"]),
        (["*"], ALL),
        (["x/*.parquet"], ["x/b.parquet"]),
        (["**/*.parquet"], ALL),
        (["**/[bc].parquet"], ["x/b.parquet", "x/y/c.parquet"]),
        (["?/y"], ["x/y/c.parquet"]),
        (["**"], ALL),
        (["[draft] a.parquet"], ["[draft] a.parquet"]),  # which exists, so it is no glob
        (["export.data"], ["export.data"]),  # a named file is taken whatever its suffix
        (["x/b.parquet", "x", "x/*.parquet", "file:x/b.parquet"], ["x/b.parquet", "x/y/c.parquet"]),
    ],
)
def test_sources_are_files_folders_and_globs_and_give_each_file_once(
    tmp_path: Path, sources: list[str], expected: list[str]
) -> None:
    touch(tmp_path, *ALL, "x/.hidden.parquet", "notes.doc", "export.data")
    places = [
        f"file://{tmp_path}/{source[5:]}" if source.startswith("file:") else f"{tmp_path}/{source}"
        for source in sources
    ]
    assert relative(tmp_path, places) == expected


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


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("missing.parquet", "does not exist"),
        ("*.parquet", "no file that can be read"),
        ("", "must be a path"),
        ("nothing://x/y", "URI that Arrow or fsspec can open"),
        ("empty", "holds no file that can be read .*; it is empty$"),
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


def test_a_bounded_source_leaves_links_out_by_name_and_refuses_them_in_tables(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for place in (allowed / "own" / "a.txt", secret / "b.txt"):
        place.parent.mkdir(parents=True)
        place.write_text("a text")
    (allowed / "inner.txt").symlink_to(allowed / "own" / "a.txt")
    (allowed / "file.txt").symlink_to(secret / "b.txt")
    (allowed / "folder").symlink_to(secret)
    left_out = LeftOut()
    for bound in (str(allowed), allowed.as_uri()):
        found = resolve_sources([BoundedSource(source=str(allowed), allowed=(bound,))], left_out)
        assert [file.relative for file in found] == ["inner.txt", "own/a.txt"]
    assert left_out.counts == {OUTSIDE: 4}
    assert "allowed/folder" in next(left_out.warnings())
    names = [file.relative for file in resolve_sources([str(allowed)])]
    assert names == ["file.txt", "folder/b.txt", "inner.txt", "own/a.txt"]
    for source in (secret, allowed / "folder", allowed / "folder" / "*.txt", allowed / "f*"):
        with pytest.raises(SourceError, match="may be read"):
            resolve_sources([BoundedSource(source=str(source), allowed=(str(allowed),))])
    table = allowed / "table"
    (table / "_delta_log").mkdir(parents=True)
    (table / "part.parquet").symlink_to(secret / "b.txt")
    with pytest.raises(SourceError, match=r"must have no links, got .*table/part\.parquet"):
        resolve_sources([BoundedSource(source=str(table), allowed=(str(allowed),))])
