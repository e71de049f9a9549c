"""What `cairn status` says of segments, and `--verify`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.encode import EncodedCorpus
from cairn.pipeline.line.publish import tokens_per_second
from cairn.pipeline.serve.uploads import Store, Uploads


@pytest.mark.parametrize(
    ("partitions", "added", "deleted"),
    [
        ("1", "2; no merge is due  (cairn compact makes one of all)\n", "; no merge is due"),
        ("2", "2 in 2 partitions\n", "  (cairn compact makes one of each partition,"),
    ],
)
def test_status_counts_segments_their_vectors_and_what_is_deleted(
    call: Any,
    ingest: Any,
    monkeypatch: pytest.MonkeyPatch,
    partitions: str,
    added: str,
    deleted: str,
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
    texts = ["a cairn marks the way", "the river runs", "snow lies on the ridge"]
    ingest("--partitions", partitions, id="abc", text=texts)
    lines = [line.split() for line in call("status", "c")[1].splitlines()]
    assert ["segments", "1"] in lines
    ingest(id="d", text=["a path by the river"])
    _, out, _ = call("status", "c")
    assert added in out
    assert "document index  4 vectors: 4 in flat" in out
    assert "deleted" not in out
    call("delete", "c", "a")
    said = added.split(";")[0].rstrip()
    assert f"{said}, 25.0% of their documents deleted{deleted}" in call("status", "c")[1]


@pytest.mark.parametrize("words", [("status", "c"), ("search", "river", "--collection", "c")])
def test_verify_finds_bits_that_opening_does_not_look_at(
    call: Any, ingested: None, tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert call(*words, "--verify")[0] == 0
    (rows,) = (tmp_path / "cairn-data" / "c" / "lance" / "documents.lance" / "data").iterdir()
    content = rows.read_bytes()
    rows.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    assert call(*words)[0] == 0
    code, _, err = call(*words, "--verify")
    assert (code, f"{rows.name} of generation 1 does not match its SHA-256" in err) == (1, True)
    with pytest.raises(DamageError, match=rows.name):
        len(open_collection("c", verify=True).documents)


def test_list_names_every_collection_and_drop_deletes_the_one_that_is_typed(
    call: Any, refused: Any, ingest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("list")[:2] == (0, f"no collections under {tmp_path / 'cairn-data'}\n")
    ingest(id="abc", text=["a cairn marks the way", "the river runs", "snow lies on the ridge"])
    listed = call("list")[1].splitlines()
    assert [listed[0].split(), listed[1].split()] == [
        ["collection", "documents", "chunks", "generation"],
        ["c", "3", "3", "1"],
    ]
    assert [each["collection"] for each in json.loads(call("list", "--json")[1])] == ["c"]
    for typed, words in (("d\n", "c must be typed to delete it, got 'd'"), ("", "got ''")):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code, _, err = call("drop", "c")
        assert (code, words in err, (tmp_path / "cairn-data" / "c").is_dir()) == (2, True, True)
    with CollectionLayout(tmp_path / "cairn-data", "c").writer_lock():
        assert "is being written by another run" in refused("drop", "c", "--yes", code=75)
    call("switch", "handbook", "c")
    assert "must not answer for another name, got 'handbook'" in refused("drop", "c", "--yes")
    (tmp_path / "cairn-data" / "aliases.json").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
    uploads = Uploads(tmp_path / "cairn-data")
    uploads.name_store("c", Store(name="Handbook", metadata=None, created_at=1))
    assert call("drop", "c")[:2] == (0, "c: deleted\n")
    assert uploads.store("c") is None
    assert not (tmp_path / "cairn-data" / "c").exists()
    refused("drop", "c", "--yes")


def test_help_of_ingest_shows_ten_options_and_help_all_every_one(call: Any) -> None:
    short, whole = (call("ingest", option)[1] for option in ("--help", "--help-all"))
    flags = [line.split()[0] for line in short.splitlines() if line.strip().startswith("--")]
    assert len([flag for flag in flags if not flag.startswith("--help")]) == 10
    assert "--pooling" not in short
    assert all(words in whole for words in (*flags, "--pooling", "--shard-deadline", "Encoder:"))


def test_a_small_update_hardly_moves_the_rate_of_encoding() -> None:
    def encoded(tokens: int, seconds: float) -> EncodedCorpus:
        return EncodedCorpus(
            encoder_fingerprint="",
            vector_dim=1,
            sparse_fingerprint=None,
            first_shard=0,
            documents=1,
            tokens=tokens,
            seconds=seconds,
        )

    base: Any = SimpleNamespace(tokens=100_000, encode_tokens_per_second=1_000.0)
    assert tokens_per_second(base, encoded(10, 5.0)) == pytest.approx(1_000, rel=0.05)
    assert tokens_per_second(base, encoded(900_000, 450.0)) == pytest.approx(1_818, rel=0.01)
    assert tokens_per_second(None, encoded(100, 4.0)) == 25.0
    assert tokens_per_second(base, encoded(0, 0.0)) == 1_000.0
