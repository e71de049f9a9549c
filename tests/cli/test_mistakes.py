"""What goes wrong ends in one sentence and an exit code, and what the sentence advises works."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import COPIES

HUGE = f"1{'0' * 400}"
LONG = "a" * 401


INGEST = "ingest corpus.parquet --collection c"
TRAIN = "train x --output run --steps"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("search x --collection nowhere", "/cairn-data, got none; known collections: none yet"),
        ("serach x", "there is no verb 'serach'; did you mean 'search'?"),
        ("xyzzy", "there is no verb 'xyzzy'; `cairn --help` lists them"),
        ("status nowhere", "known collections"),
        ("compact nowhere", "known collections"),
        ("drop nowhere --yes", "known collections"),
        ("delete nowhere a", "known collections"),
        ("ingest missing.parquet --collection c", "missing.parquet"),
        ("ingest notes.data --collection c", "notes.data"),
        ("ingest empty.parquet --collection c", "empty.parquet"),
        (f"{INGEST} --text-column body", "text"),
        ("ingest corpus.parquet --collection ../up", "name must match"),
        (f"{INGEST} --model no-such-model", "no-such-model"),
        (f"{INGEST} --model ''", "model must be cairn-minilm"),
        (f"{INGEST} --model {'m' * 300}", "model must be cairn-mini"),
        (f"{INGEST} --model ~nobody/m", "model must be cairn-mini"),
        (f"{INGEST} --temperature 0", "error: temperature must be a number from 0.01 to 100, got 0.0"),
        (f"{INGEST} --document-prefix \udcff", "document_prefix must be valid Unicode"),
        (f"{INGEST} --window-tokens -5", "error: window_tokens must be a whole number of at least 1, got -5"),
        (f"{INGEST} --query-temperature -1", "error: query_temperature must be a number from"),
        (f"{INGEST} --layers 0", "layers must be a whole number of at least 1, got 0"),
        (f"{INGEST} --pooling multi_cls", "must go with attention full, got chunk"),
        (f"{INGEST} --root gs://bucket/x", "folder or s3://BUCKET/PREFIX"),
        (f"{INGEST} --root notes.data", "must be a folder"),
        ("search x --collection c --root notes.data", "must be a folder"),
        (f"{INGEST} --num-clusters 65537", "from 1 to 65,536"),
        (f"{INGEST} --context-documents {HUGE}", "from 1 to 65,536"),
        (f"{INGEST} --workers 10001", "from 1 to 10,000"),
        (f"{TRAIN} {HUGE}", "steps must be at most 1,000,000,000, got a nu"),
        (f"{TRAIN} 2 --hard-negatives {HUGE}", "from 0 to 1,000"),
        (f"{TRAIN} 2 --peak-lr 1e300", "at most 1, got 1e+300"),
        (f"{TRAIN} 2 --dev {LONG}", "names of at most 255 bytes"),
        (f"list --root {LONG}", "a path must have names of at most 255 bytes, got '/"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    refused: Any, corpus: str, tmp_path: Path, arguments: str, words: str
) -> None:
    (tmp_path / "notes.data").write_text("not parquet at all")
    pq.write_table(
        pa.table({"id": pa.array([], "string"), "text": pa.array([], "string")}), tmp_path / "empty.parquet"
    )
    assert words in refused(*shlex.split(arguments))
    assert not (tmp_path / "cairn-data" / "c" / "CURRENT").exists()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--dims", "33", "between 1 and the model's 32, got 33"),
        ("--layers", "3", "between 1 and the model's 2, got 3"),
        ("--query-prefix", "a " * 90, "query_prefix must leave"),
        ("--model", "a CDE checkpoint", "must be at most the model's 6, got 512; choose 6"),
    ],
)
def test_setting_the_model_has_no_room_for_ends_in_one_sentence_and_exit_2(
    refused: Any,
    corpus: str,
    tmp_path: Path,
    ingest_options: list[str],
    make_cde: Any,
    option: str,
    value: str,
    words: str,
) -> None:
    value = str(make_cde(1)) if option == "--model" else value
    assert words in refused("ingest", corpus, *ingest_options, option, value, "--quiet")
    assert not (tmp_path / "cairn-data").exists()


def test_settings_that_differ_from_the_collections_are_named(
    refused: Any, ingested: None, corpus: str, ingest_options: list[str]
) -> None:
    others = ("--dims", "16", "--attention", "full", "--window-tokens", "64")
    err = refused("ingest", corpus, *ingest_options, *others)
    for words in (
        "encoder.dims is not set, got 16",
        "encoder.attention is 'chunk', got 'full'",
        "encoder.window_tokens is 512, got 64",
    ):
        assert words in err
    assert "overlap" not in err


def test_busy_collection_exits_75_and_an_interrupt_130(
    call: Any,
    refused: Any,
    corpus: str,
    ingest_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CollectionLayout(tmp_path / "cairn-data", "c").writer_lock():
        refused("ingest", corpus, *ingest_options, "--quiet", code=75)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cairn.pipeline.line.build_index.build_index", interrupted)
    code, _, err = call("ingest", corpus, *ingest_options, "--quiet")
    assert (code, "interrupted" in err) == (130, True)


def test_verify_finds_a_flipped_bit_and_repair_mends_it(call: Any, ingested: None, tmp_path: Path) -> None:
    assert call("verify", "c")[0] == 0
    path = tmp_path / "cairn-data" / "c" / "generations" / "00000001" / "chunks.faiss"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out, _ = call("verify", "c")
    assert code == 1
    assert out.startswith("generation 1, chunks.faiss: ")
    assert call("search", "stone", "--collection", "c")[0] == 1
    assert call("repair", "c")[0] == 0
    assert call("verify", "c")[0] == 0
    assert call("search", "stone", "--collection", "c")[0] == 0


@pytest.mark.parametrize("damaged", ["documents.arrow", "MANIFEST.json"])
def test_advice_after_damage_is_a_command_that_mends_it(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, damaged: str
) -> None:
    at_root = ("--root", str(tmp_path.resolve() / "my data"))
    call("ingest", corpus, *ingest_options, "--quiet", *at_root)
    call("compact", "c", *at_root)
    folder = tmp_path / "my data" / "c"
    generation = folder / "generations" / (folder / "CURRENT").read_text().split()[0]
    shutil.rmtree(folder / COPIES)
    (generation / damaged).write_bytes(b"no such thing")
    code, _, err = call("status", "c", *at_root)
    assert code == 1
    advised = err.splitlines()[-1].partition("run `")[2].removesuffix("`")
    assert shlex.split(advised) == ["cairn", "repair", "c", *at_root]
    assert call(*shlex.split(advised)[1:])[0] == 0
    assert call("status", "c", *at_root)[0] == 0


def test_collection_whose_first_ingest_was_stopped_is_listed_and_said_to_be_unfinished(
    call: Any, refused: Any, tmp_path: Path
) -> None:
    layout = CollectionLayout(tmp_path / "cairn-data", "coming")
    with layout.writer_lock():
        assert "building" in call("list")[1]
    unknown = dict.fromkeys(("documents", "chunks", "generation"))
    assert json.loads(call("list", "--json")[1]) == [
        {"status": "unfinished", "collection": "coming", **unknown}
    ]
    for verb in (("status", "coming"), ("search", "granite", "--collection", "coming")):
        assert "run `cairn ingest` again" in refused(*verb)


@pytest.mark.parametrize(
    "arguments", [("keys", "list", "--keys-file="), ("serve", "--keys-file="), ("evaluate", "x", "--cache=")]
)
def test_empty_path_is_refused_with_its_option(call: Any, arguments: tuple[str, ...]) -> None:
    code, _, err = call(*arguments)
    option = arguments[-1].removesuffix("=")
    assert (code, f"'{option}': a path must name a file or a folder" in err) == (2, True)
