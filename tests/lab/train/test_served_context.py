"""What a model was trained with is what it is served with: the context's size, number and length."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.contrastive import TrainingData, draw_batch, train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.model.folders.own_tensors import CONTEXT_GATES, CONTEXT_SIZE
from cairn.pipeline.model.untrained_settings import settings_warnings
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import LOOP_SETTINGS, tiny_pairs

TEXTS = ["the cat sat on the old stone path by a river", "walking on a mat", "a mountain way " * 6]


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [record["document"] for record in tiny_pairs(600, seed=3)]


@pytest.fixture
def trained(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """Train a model behind 64 context vectors, with gates that let much of them in."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in tiny_pairs(160)))
    settings = {
        "steps": 6,
        "batch_pairs": 72,
        "context_documents": 64,
        "context_absence": 0.0,
        "initial_gate": 1.0,
        "heldout_pairs": 0,
    }
    config = TrainConfig(**{**LOOP_SETTINGS, **settings})
    train([file], tmp_path / "run", config, base=str(tiny_model_folder))
    return tmp_path / "run" / "model"


def vectors(folder: Path, documents: list[str]) -> np.ndarray:
    """Embed the texts behind these context documents, as an ingest does; without any behind none."""
    config = replace(encoder_config({"model": str(folder)}), precision="fp32", use_context=bool(documents))
    backbone = load_backbone(config)
    if not documents:
        return DocumentEncoder(config, backbone=backbone).encode(TEXTS).document_vectors_NV
    first_stage = ContextEncoder.of(backbone, config, context_config(str(folder), {}))
    ids = tuple(map(str, range(len(documents))))
    context = ContextSet(
        doc_ids=ids,
        content_sha256s=ids,
        cluster_ids_C=np.zeros(len(ids), np.int32),
        embeddings_CD=first_stage.embed(documents),
        first_stage_fingerprint=first_stage.fingerprint,
    )
    return DocumentEncoder(config, context, backbone).encode(TEXTS).document_vectors_NV


def least_cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum(1).min())


def test_model_trained_with_64_context_vectors_is_nearly_the_same_behind_512(
    trained: Path, documents: list[str]
):
    # Drawn from all of the documents, as by an ingest: they are in the order of their topics.
    few, many = (vectors(trained, drawn) for drawn in (documents[:512:8], documents[:512]))
    assert least_cosine(few, many) > 0.99
    assert least_cosine(few, vectors(trained, [])) < 0.99  # the context counts


def test_context_repeated_gives_the_same_vectors(trained: Path, documents: list[str]):
    once, eight_times = (vectors(trained, documents[:64] * count) for count in (1, 8))
    np.testing.assert_allclose(eight_times, once, atol=1e-5)


def test_gates_that_do_not_say_their_context_weigh_by_its_size(trained: Path, documents: list[str]):
    said = least_cosine(*(vectors(trained, documents[:count]) for count in (8, 512)))
    extra = load_file(trained / EXTRA_NAME)
    assert extra.pop(CONTEXT_SIZE).tolist() == [64.0]
    save_file(extra, trained / EXTRA_NAME)
    assert least_cosine(*(vectors(trained, documents[:count]) for count in (8, 512))) < said


def test_training_and_serving_weigh_a_context_alike(trained: Path, documents: list[str]):
    served = vectors(trained, documents[:40])
    checkpoint = read_checkpoint(trained)
    settings = encoder_config({"model": str(trained)})
    size = len(TEXTS)
    pairs = TrainingPairs(
        queries=("q",) * (size + 40),
        documents=(*TEXTS, *documents[:40]),
        titles=("",) * (size + 40),
        sources=("s",) * (size + 40),
    )
    maker = SequenceMaker(
        checkpoint, pairs, pooling=settings.pooling, max_query_tokens=16, max_document_tokens=96
    )
    model = LandmarkEncoder(checkpoint).requires_grad_(False)
    context_CD = model.embed_documents(
        maker.context(range(size, size + 40), LOOP_SETTINGS["max_context_tokens"])
    )
    rows, text_B = maker.documents(range(size), settings.landmark_interval)
    assert text_B.tolist() == list(range(size))
    embedded = model(rows, context_CD).numpy()
    np.testing.assert_allclose(embedded / np.linalg.norm(embedded, axis=1, keepdims=True), served, atol=1e-4)


def test_folder_brings_the_context_of_training_to_a_new_collection(trained: Path):
    config = resolve_ingest_config({"encoder": {"model": str(trained)}}, None)
    assert (config.context.context_documents, config.context.max_document_tokens) == (64, 12)
    chosen = resolve_ingest_config(
        {"encoder": {"model": str(trained)}, "context": {"context_documents": 9}}, None
    )
    assert (chosen.context.context_documents, chosen.context.max_document_tokens) == (9, 12)
    stored = {"context": {"context_documents": 7, "max_document_tokens": 5, "seed": 0}}
    assert resolve_ingest_config({"encoder": {"model": str(trained)}}, stored).context.context_documents == 7


def test_context_larger_than_that_of_training_is_said_in_one_sentence(trained: Path):
    encoder = encoder_config({"model": str(trained)})
    brought = context_config(str(trained), {})
    assert settings_warnings(encoder, brought) == ()
    assert settings_warnings(encoder, replace(brought, context_documents=9)) == ()
    larger = replace(brought, context_documents=65, max_document_tokens=13)
    (warning,) = settings_warnings(encoder, larger)
    assert "was not trained for context_documents 65, max_document_tokens 13, but for 64, 12: " in warning
    assert settings_warnings(replace(encoder, use_context=False), larger) == ()


def test_pooling_of_context_documents_stands_in_the_folder_and_another_is_refused(trained: Path):
    path = trained / "cairn_config.json"
    content = json.loads(path.read_text())
    assert content["context"].pop("pooling") == "mean"
    path.write_text(json.dumps(content))
    assert context_config(str(trained), {}).context_documents == 64
    content["context"]["pooling"] = "max"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="must be mean, got 'max'; update Cairn"):
        context_config(str(trained), {})


@pytest.mark.parametrize("content", [{"context_documents": 0, "max_document_tokens": 3}, {"other": 1}, 5])
def test_context_of_a_folder_that_is_none_is_refused(trained: Path, content: Any):
    path = trained / "cairn_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "context": content}))
    with pytest.raises(ModelError, match="must hold context_documents and max_document_tokens, got others"):
        context_config(str(trained), {})


def test_folder_that_says_nothing_of_a_context_brings_the_default(tiny_model_folder: Path):
    assert context_config(str(tiny_model_folder), {}) == ContextConfig()


def test_base_whose_gates_do_not_say_their_context_goes_on_without(trained: Path, tmp_path: Path):
    extra = load_file(trained / EXTRA_NAME)
    assert CONTEXT_GATES in extra
    assert LandmarkEncoder(read_checkpoint(trained), context_size=7).context_size == 64
    del extra[CONTEXT_SIZE]
    save_file(extra, trained / EXTRA_NAME)
    assert LandmarkEncoder(read_checkpoint(trained), context_size=7).context_size is None


def test_context_from_source_is_drawn_from_all_documents_of_the_batch_s_source(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    from cairn.pipeline.lab.train.pair_data import pools_of_sources
    from cairn.pipeline.lab.train.pair_vectors import PairVectors
    from cairn.pipeline.lab.train.pairs import text_numbers

    pairs = make_pairs(60)
    maker = SequenceMaker(
        read_checkpoint(tiny_model_folder), pairs, pooling="lmk", max_query_tokens=16, max_document_tokens=64
    )
    drawn: list[list[int]] = []
    maker.context = lambda positions, tokens: drawn.append(list(positions))  # pyright: ignore
    heldout = np.array([3, 4], np.int64)
    data = TrainingData(
        maker=maker,
        vectors=PairVectors(
            document_NV=np.zeros((60, 4), np.float32), query_NV=np.zeros((60, 4), np.float32), fingerprint=""
        ),
        document_number_N=text_numbers(pairs.documents),
        hard_negatives_Nk=np.zeros((60, 0), np.int64),
        pool_of_pair=pools_of_sources(pairs, heldout),
    )
    config = TrainConfig(steps=1, context_documents=20, context_absence=0.0)
    draw_batch(data, [(0, 1), (6, 7)], np.random.default_rng(0), config, 96)
    (context,) = drawn
    assert len(set(context)) == 20
    assert {pairs.sources[position] for position in context} == {"s0"}
    assert not {3, 4} & set(context)
    assert len(set(context) - {0, 1, 6, 7}) > 10
    mixed = draw_batch(data, [(0, 1), (40, 41)], np.random.default_rng(0), config, 96)
    assert mixed[1] is None
