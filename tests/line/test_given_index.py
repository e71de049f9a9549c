"""Documents that bring their vectors through the whole line: rows in, answers to vectors and texts out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cairn
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn as command
from cairn.cli.main import run
from cairn.pipeline.collection import load_query_encoder
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.encode import documents
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import (
    ConfigError,
    FingerprintMismatchError,
    SchemaError,
    SourceError,
    UsageError,
)
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.search.shards.in_process import shards_of
from tests.served_stones import wait_until
from tests.small_ingests import stopped_at

RNG = np.random.default_rng(7)
VECTORS = RNG.normal(size=(8, 12))
TEXTS = [f"stone {number} on the old mountain path" for number in range(8)]
OF_VECTORS: dict[str, Any] = {"corpus": {"vector_column": "embedding"}, "cluster": {"num_clusters": 2}}


def _rows(numbers: Any = range(8)) -> list[dict[str, Any]]:
    return [
        {"id": f"d{n}", "text": TEXTS[n], "even": n % 2 == 0, "embedding": VECTORS[n].tolist()}
        for n in numbers
    ]


def _chunks(number: int, *spans: tuple[int, int], text: str) -> dict[str, Any]:
    chunks = [
        {"start": start, "end": end, "vector": VECTORS[number + place].tolist()}
        for place, (start, end) in enumerate(spans)
    ]
    return {"id": f"d{number}", "text": text, "embedding": chunks}


def _collection(root: Path, name: str = "c", **settings: Any) -> cairn.Collection:
    return cairn.Collection.create(name, root=root, settings={**OF_VECTORS, **settings})


def _found(results: list[Any]) -> list[str]:
    return [hit.doc_id for hit in results[0].hits]


def test_vectors_are_searched_by_vector_and_texts_by_words_alone(root: Path) -> None:
    notes = _collection(root)
    report = notes.add(_rows())
    (told,) = (each for each in report.warnings if "bring their vectors" in each)
    assert "texts are answered by BM25 alone" in told
    assert told in notes.status()["warnings"]
    best = notes.search_vectors(5.0 * VECTORS[3:4])[0].hits[0]
    assert (best.doc_id, best.passages[0].text) == ("d3", TEXTS[3])
    assert best.score == pytest.approx(1.0)
    assert _found(notes.search_vectors(VECTORS[3:4], granularity="chunk"))[0] == "d3"
    even = notes.search_vectors(VECTORS[3:4], filters={"type": "eq", "key": "even", "value": True})
    assert sorted(_found(even)) == ["d0", "d2", "d4", "d6"]
    found = notes.search("stone 5").hits[0]
    assert found.doc_id == "d5"
    assert "chunk" not in {*found.scores, *found.passages[0].scores}  # nothing has a cosine with a text
    assert notes.search("nowhere").hits == ()
    assert "nothing was ranked" in notes.search("nowhere").warnings[0]
    for options in ({"hybrid": False}, {"min_probability": 0.5}):
        with pytest.raises(UsageError):
            notes.search("stone", **options)
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_shards_answer_texts_by_words_alone_as_one_process_does(root: Path) -> None:
    collection = _collection(root)
    collection.add(_rows())
    encoder, shards = load_query_encoder(open_generation(collection.layout)), shards_of(root, 2)
    sharded = Searcher(collection.layout, encoder, open_one=shards)
    for query in ("stone 3", "nothing of the kind"):
        assert sharded.search(query, top_k=4) == collection.search(query, top_k=4)


def test_a_changed_vector_is_a_changed_document_and_a_longer_one_is_not(root: Path) -> None:
    notes = _collection(root)
    notes.add(_rows())
    rows = _rows()
    rows[0]["embedding"] = VECTORS[1].tolist()
    rows[2]["embedding"] = (7.0 * VECTORS[2]).tolist()
    report = notes.add(rows)
    assert (report.encoded, report.unchanged) == (1, 7)
    assert sorted(_found(notes.search_vectors(VECTORS[1:2], top_k=2))) == ["d0", "d1"]
    assert notes.sync(rows[:7]).deleted == 1
    assert notes.delete("d1").deleted == 1
    assert _found(notes.search_vectors(VECTORS[1:2]))[0] == "d0"


@pytest.mark.parametrize("kind", ["rows", "parquet", "jsonl", "lance"])
def test_chunks_rank_their_document_and_passages_share_no_character(
    root: Path, tmp_path: Path, kind: str
) -> None:
    text = "alpha beta. gamma delta. the end\n"
    rows = [_chunks(0, (2, 12), (6, 24), (25, 32), text=text), _chunks(4, (0, 5), text="other")]
    source: Any = rows
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source := tmp_path / "a.parquet")
    elif kind == "jsonl":
        source = tmp_path / "a.jsonl"
        source.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"id": "x", "text": "x"}]))
    elif kind == "lance":
        lance = pytest.importorskip("lance")
        lance.write_dataset(pa.Table.from_pylist(rows), source := str(tmp_path / "a.lance"))
    notes = _collection(root)
    report = notes.add(source)
    assert (report.indexed, report.chunks, report.quarantined) == (2, 4, int(kind == "jsonl"))
    best = notes.search_vectors(VECTORS[1:2])[0].hits[0]
    assert best.doc_id == "d0"
    spans = [(passage.start_char, passage.end_char) for passage in best.passages]
    assert (spans[0], sorted(spans)) == ((6, 25), [(0, 6), (6, 25), (25, len(text))])
    unit = VECTORS[:3] / np.linalg.norm(VECTORS[:3], axis=1, keepdims=True)
    (of_document,) = notes.search_vectors(unit.mean(axis=0)[None], granularity="document", top_k=1)
    assert (of_document.hits[0].doc_id, round(of_document.hits[0].score, 4)) == ("d0", 1.0)


def test_a_long_document_is_cut_into_passages_that_words_tell_apart(root: Path) -> None:
    notes = _collection(root, encoder={"landmark_interval": 8})
    text = " ".join(["the old path leads to a stone."] * 20 + ["here is a river."])
    notes.add([{"id": "long", "text": text, "embedding": VECTORS[0].tolist()}])
    assert notes.status()["chunks"] > 10
    (hit,) = notes.search_vectors(VECTORS[:1], queries=["river"], passages=1)[0].hits
    assert "river" in hit.passages[0].text
    with pytest.raises(UsageError, match="one query text a vector, got 2 texts and 1 vectors"):
        notes.search_vectors(VECTORS[:1].tolist(), queries=["river", "stone"])


def test_rows_without_fit_vectors_are_quarantined_and_named(root: Path) -> None:
    rows = _rows()
    rows[2]["embedding"], rows[3]["embedding"], rows[4]["embedding"] = [1.0], None, [0.0] * 12
    report = _collection(root).add(rows)
    assert report.quarantine_reasons == {"unfit_vector": 3}
    assert report.quarantine_examples["unfit_vector"].endswith(
        "row 2: column 'embedding' must hold vectors of 12 numbers, got one of 1"
    )
    with pytest.raises(SourceError, match="every row was quarantined"):
        _collection(root, "zeros").add([{"id": "a", "text": "a", "embedding": [0.0]}])


@pytest.mark.parametrize(
    ("row", "encoder", "error", "told"),
    [
        ({}, {}, SchemaError, "vector column 'embedding' must be there"),
        ({"embedding": "text"}, {}, SchemaError, "must hold lists of numbers, or of objects"),
        ({"embedding": [{"begin": 0, "vector": [1.0]}]}, {}, SchemaError, "with start, end and vector"),
        ({"embedding": None}, {}, SourceError, "must hold a vector in some row"),
        ({"embedding": [1.0]}, {"pooling": "cls"}, ConfigError, "pooling must go with a model that encodes"),
        ({"embedding": [1.0]}, {"token_bytes": 8}, ConfigError, "token_bytes must go with a model that enc"),
    ],
)
def test_a_column_without_vectors_and_settings_without_a_model_stop_with_a_sentence(
    root: Path, row: dict[str, Any], encoder: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        _collection(root, encoder=encoder).add(pa.Table.from_pylist([{"id": "a", "text": "a", **row}]))
    assert not (root / "c").exists()


def test_a_collection_never_holds_given_and_encoded_vectors(root: Path, config: Any) -> None:
    stages = config.to_dict()
    encoded = cairn.Collection.create(
        "encoded", root=root, settings={name: stages[name] for name in ("encoder", "cluster", "context")}
    )
    encoded.add([{"id": "a", "text": "the cat"}])
    with pytest.raises(FingerprintMismatchError, match="encode all its documents"):
        encoded.add(_rows(), vector_column="embedding")
    given = cairn.Collection.create("given", root=root)
    given.add(_rows(), vector_column="embedding")
    wide = {"id": "w", "text": "wide", "embedding": [1.0] * 13}
    assert given.add([wide, *_rows([0])]).quarantine_reasons == {"unfit_vector": 1}
    with pytest.raises(FingerprintMismatchError, match="no --vector-column"):
        given.add([{"id": "a", "text": "a"}], vector_column=None)
    stored, source = given.status()["settings"], TableSource(table=pa.Table.from_pylist(_rows()))
    encoded_by = resolve_ingest_config({"encoder": {"model": "all-MiniLM-L6-v2"}}, stored)
    with pytest.raises(ConfigError, match="name that model, or none"):
        build_index([source], root, "given", encoded_by)
    with pytest.raises(ConfigError, match="bring their vectors"):
        recontextualise(root, "given", resolve_ingest_config({}, stored))


def test_texts_are_encoded_by_the_model_that_made_the_vectors(
    root: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model_folder)
    encoder = load_encoder(model, landmark_interval=64, window_tokens=80)
    vectors_NV = encoder.encode_documents(TEXTS)
    rows = [{**row, "embedding": vector} for row, vector in zip(_rows(), vectors_NV, strict=True)]
    sizes = {"landmark_interval": 64, "window_tokens": 80}
    notes = _collection(root, encoder={"model": model, **sizes})
    report = notes.add(rows)
    assert any("encodes queries alone" in warning for warning in report.warnings)
    answer = cairn.open_collection("c", root=root).search(TEXTS[3], hybrid=False, top_k=1)
    assert answer.hits[0].scores["document"] == pytest.approx(1.0, abs=1e-5)
    monkeypatch.setattr(documents, "TOKEN_READER", model)
    report = _collection(root, "read", encoder={"model": model, **sizes, "token_bytes": 8}).add(rows)
    assert any(
        "only cairn-minilm, which knows English, gives token vectors" in warning
        for warning in report.warnings
    )
    read = cairn.open_collection("read", root=root).search(TEXTS[3], top_k=1).hits[0]
    assert (read.doc_id, "late" in read.scores, "late" in answer.hits[0].scores) == ("d3", True, False)
    with pytest.raises(ConfigError, match="name that model, or none"):
        _collection(root, "narrow", encoder={"model": model, **sizes}).add(_rows())
    assert not (root / "narrow").exists()


def test_an_engine_that_was_opened_before_the_width_is_known_is_told_it(root: Path) -> None:
    own = resolve_ingest_config(OF_VECTORS, None)
    source = TableSource(table=pa.Table.from_pylist(_rows()))
    assert build_index([source], root, "c", own, engine=EncoderWorker(own)).encoded == 8
    assert _found(cairn.open_collection("c", root=root).search_vectors(VECTORS[6:7]))[0] == "d6"


def test_a_killed_ingest_goes_on_with_the_vectors_that_it_has(root: Path) -> None:
    settings = {**OF_VECTORS, "encoder": {"landmark_interval": 16}}
    with stopped_at("shard-written"):
        cairn.Collection.create("c", root=root, settings=settings).add(_rows())
    notes = cairn.Collection.create("c", root=root, settings=settings)
    assert notes.add(_rows()).encoded == 0
    assert _found(notes.search_vectors(VECTORS[6:7]))[0] == "d6"


def test_ingest_from_the_terminal_says_what_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist(_rows()), "a.parquet")
    options = ["ingest", "a.parquet", "--collection", "c", "--quiet", "--vector-column", "embedding"]
    assert run(command, [*options, "--dry-run"], "cairn") == 0
    assert run(command, [*options, "--partitions", "2"], "cairn") == 0
    assert run(command, options[:-2], "cairn") == 0  # the column is remembered
    assert "unchanged" in capsys.readouterr().out
    assert run(command, ["status", "c"], "cairn") == 0
    told = capsys.readouterr().out
    assert "12 numbers that documents bring; queries by none" in told
    assert "texts are answered by BM25 alone" in told


def test_a_server_answers_texts_and_vectors_deletes_and_takes_no_document_without_a_vector(
    root: Path,
) -> None:
    _collection(root).add(_rows())
    settings = ServeSettings(root=root, collections=("c",), writable=True)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as client:
        path = "/v1/collections/c"
        found = client.post(f"{path}/search", json={"query": "stone 5"}).json()["hits"]
        assert found[0]["doc_id"] == "d5"
        refused = client.post("/v1/embeddings", json={"model": "c", "input": "stone 5"})
        assert (refused.status_code, "bring their vectors" in refused.text) == (422, True)
        asked = {"query": "by its vector", "query_vector": VECTORS[3].tolist(), "hybrid": False}
        assert client.post(f"{path}/search", json=asked).json()["hits"][0]["doc_id"] == "d3"
        document = {"doc_id": "new", "text": "a new river"}
        refused = client.post(f"{path}/documents", json={"documents": [document]})
        assert (refused.status_code, "vectors" in refused.text) == (422, True)
        assert client.patch(f"{path}/documents/d1", json={"metadata": {"even": True}}).status_code == 422
        answer = client.delete(f"{path}/documents/d5", params={"wait": "searchable"})
        assert answer.status_code in {200, 202}, answer.text
        write = f"{path}/writes/{answer.json()['write']}"  # under load it is answered as durable
        wait_until(lambda: client.get(write).json()["status"] != "waiting")
        hits = client.post(f"{path}/search", json={"query": "stone 5"}).json()["hits"]
        assert "d5" not in {hit["doc_id"] for hit in hits}
