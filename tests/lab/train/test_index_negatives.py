"""Hard negatives of a live collection, written as `cairn train` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import Collection, load_query_encoder, open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.index.generation import open_latest_intact_generation
from cairn.pipeline.lab.train.index_negatives import write_negatives
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.line.build_index import build_index

WORDS = ("stone", "path", "hill", "river", "mark", "way", "mountain", "walk", "cat", "mat")
NUM_DOCUMENTS = 24


def text(number: int) -> str:
    return " ".join(np.random.default_rng(number).choice(WORDS, 24)) + f" number {number}."


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("mined")
    rows = [{"id": f"doc-{number}", "text": text(number)} for number in range(NUM_DOCUMENTS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "corpus.parquet")
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=8, window_tokens=64, precision="fp32"
        ),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=4, max_document_tokens=32),
    )
    build_index([str(folder / "corpus.parquet")], folder / "root", "c", config)
    return folder / "root"


@pytest.fixture
def collection(root: Path) -> Collection:
    return open_collection("c", root=root)


def pairs_file(path: Path) -> Path:
    pairs = {
        "query": [f"where is the {WORDS[number]}" for number in range(8)],
        "document": [text(number) for number in range(8)],
        "negatives": [["a stone of its own"] if number == 3 else None for number in range(8)],
    }
    pq.write_table(pa.table(pairs), path)
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> TrainingPairs:
    return read_pairs([pairs_file(tmp_path / "pairs.parquet")])


def mined(collection: Collection, pairs: TrainingPairs, path: Path, **rule: float) -> TrainingPairs:
    write_negatives(collection, pairs, path, **{"num_negatives": 50, "max_share": 1.0, "margin": 0.0, **rule})
    return read_pairs([path])


@pytest.mark.parametrize(("share", "margin"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.2)])
def test_negatives_score_below_the_positive_by_the_rule_hardest_first(
    collection: Collection, pairs: TrainingPairs, tmp_path: Path, share: float, margin: float
) -> None:
    found = mined(collection, pairs, tmp_path / "out.parquet", max_share=share, margin=margin)
    encoder = load_query_encoder(open_latest_intact_generation(collection.layout))

    for row in found.rows():
        if row.negatives == ("a stone of its own",):
            continue
        (query_V,) = encoder.encode_queries([row.query])
        (positive,) = encoder.landmark_embeddings([row.document])
        score = float((positive.vectors_LV @ query_V).max())
        limit = score - max((1 - share) * abs(score), margin)
        (answer,) = collection.search_vectors(
            query_V[None], top_k=NUM_DOCUMENTS, granularity="chunk", hybrid=False, passages=1
        )
        expected = [
            hit.passages[0].text
            for hit in answer.hits
            if hit.scores["chunk"] < limit and row.document not in text(int(hit.doc_id[4:]))
        ]
        assert list(row.negatives) == expected
    assert any(found.negatives)


def test_pairs_keep_their_own_negatives_and_everything_else(
    collection: Collection, pairs: TrainingPairs, tmp_path: Path
) -> None:
    found = mined(collection, pairs, tmp_path / "out.parquet")

    assert found.negatives[3] == ("a stone of its own",)
    for name in ("queries", "documents", "titles", "sources", "instructions", "tasks"):
        assert getattr(found, name) == getattr(pairs, name)


def test_no_passage_of_a_document_that_holds_a_positive_is_a_negative(
    collection: Collection, tmp_path: Path
) -> None:
    part = text(5).split(" ", 4)[4]
    pq.write_table(
        pa.table({"query": ["where is it", "where is it"], "document": [part, text(6)]}),
        tmp_path / "p.parquet",
    )
    found = mined(collection, read_pairs([tmp_path / "p.parquet"]), tmp_path / "out.parquet", max_share=1.0)

    holders = (text(5), text(6))
    assert any(found.negatives)
    assert not any(negative in holder for each in found.negatives for negative in each for holder in holders)


def test_negatives_verb_writes_what_train_reads(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.parquet"
    arguments = ["--pairs", str(pairs_file(tmp_path / "p.parquet")), "--output", str(output), "--quiet"]
    code = run(
        cairn,
        ["negatives", "c", "--root", str(root), *arguments, "--hard-negatives", "2", "--json"],
        "cairn",
    )
    report = json.loads(capsys.readouterr().out)

    assert (code, report["pairs"], report["pairs_with_own"]) == (0, 8, 1)
    written = read_pairs([output]).negatives
    assert max(map(len, written)) == 2
    assert report["negatives"] == sum(map(len, written))
    assert report["pairs_without"] == sum(not each for each in written)
