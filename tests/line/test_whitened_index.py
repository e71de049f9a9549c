"""Whitening through the whole line: an ingest draws the sample, stores it, and a search reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_index import LanceTables, vectors_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.recontextualise import plan_recontextualisation

WORDS = ["stone", "hill", "path", "river", "old", "walk", "cat", "mat", "mark", "the"]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=12)) for _ in range(count)]


def ingest(folder: Path, model: Path, found: list[str], config: IngestConfig | None = None) -> None:
    table = pa.table({"id": [f"d{number:02}" for number in range(len(found))], "text": found})
    pq.write_table(table, folder / "corpus.parquet")
    build_index([str(folder / "corpus.parquet")], folder, "c", config or settings(model))


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(model=str(model), landmark_interval=16, whitening=0.3, precision="fp32"),
        context=ContextConfig(context_documents=20, max_document_tokens=16),
    )


def stored(folder: Path) -> np.ndarray:
    layout = CollectionLayout(folder, "c")
    versions = open_generation(layout).manifest.lance_versions
    found = {}
    for batch in LanceTables.open(layout).scan("documents", ["doc_id", "vector"], versions):
        found |= dict(zip(batch["doc_id"].to_pylist(), vectors_of(batch["vector"]), strict=True))
    return np.array([found[doc_id] for doc_id in sorted(found)])


def test_stored_vectors_are_those_of_an_encoder_with_the_stored_context(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    ingest(tmp_path, tiny_model_folder, texts(30))
    generation = open_generation(CollectionLayout(tmp_path, "c"))
    context = ContextSet.read(generation.side_file("context.arrow"))
    config = settings(tiny_model_folder).encoder

    whitened = load_encoder(context=context, **encoder_settings(config)).encode_documents(texts(30))
    plain = load_encoder(**encoder_settings(replace(config, whitening=0.0))).encode_documents(texts(30))

    assert context.vectors_CV is not None
    assert context.vectors_CV.shape == (20, plain.shape[1])
    assert stored(tmp_path) == pytest.approx(whitened, abs=1e-5)
    assert not np.allclose(whitened, plain, atol=1e-2)


def encoder_settings(config: EncoderConfig) -> dict[str, object]:
    names = ("model", "landmark_interval", "whitening", "precision")
    return {name: getattr(config, name) for name in names}


def test_search_whitens_the_query_and_finds_the_document(tmp_path: Path, tiny_model_folder: Path) -> None:
    ingest(tmp_path, tiny_model_folder, texts(30))

    hit = open_collection("c", root=tmp_path).search(texts(30)[7], hybrid=False).hits[0]

    assert hit.doc_id == "d07"
    assert hit.scores["document"] == pytest.approx(1.0, abs=1e-4)


def test_later_ingest_keeps_the_sample_and_moves_no_vector(tmp_path: Path, tiny_model_folder: Path) -> None:
    ingest(tmp_path, tiny_model_folder, texts(30))
    before = stored(tmp_path)
    ingest(tmp_path, tiny_model_folder, texts(30) + texts(5, seed=1))

    assert np.array_equal(stored(tmp_path)[:30], before)
    assert len(stored(tmp_path)) == 35


def test_new_context_would_encode_every_document(tmp_path: Path, tiny_model_folder: Path) -> None:
    ingest(tmp_path, tiny_model_folder, texts(30))

    plan = plan_recontextualisation(tmp_path, "c")

    assert plan.reads_context
    assert plan.encode_documents == 30


def test_context_without_vectors_is_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    plain = replace(settings(tiny_model_folder), encoder=EncoderConfig(model=str(tiny_model_folder)))
    ingest(tmp_path, tiny_model_folder, texts(30), plain)
    context = ContextSet.read(open_generation(CollectionLayout(tmp_path, "c")).side_file("context.arrow"))

    with pytest.raises(ConfigError, match="whitening must come with a context that holds vectors"):
        load_encoder(tiny_model_folder, context=context, whitening=0.3)


def test_context_of_vectors_of_another_width_is_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    ingest(tmp_path, tiny_model_folder, texts(30))
    context = ContextSet.read(open_generation(CollectionLayout(tmp_path, "c")).side_file("context.arrow"))

    with pytest.raises(ConfigError, match="whitening must have a context of vectors of 16 numbers, got 32"):
        load_encoder(tiny_model_folder, context=context, whitening=0.3, dims=16)
