"""A CDE checkpoint through the whole line.

Its first stage embeds the context, its second stage reads it, for documents and queries.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ContextConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import TextEncoder
from cairn.pipeline.errors import ConfigError, FingerprintMismatchError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from safetensors.torch import load_file, save_file

from tests import small_ingests

TEXTS = [
    "the cat sat on the mat.",
    "old stone path over the mountain.",
    "a river walks to the sea; the way is marked.",
    "walking the old way, stone by stone.",
    "the mat on the mountain path.",
    "cats walk on rivers.",
    "marks on stones show the way.",
    "a mountain, a river, a path.",
]


@pytest.fixture(params=[1, 2])
def folder(make_cde: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a checkpoint of a version, to be changed at will."""
    made = make_cde(request.param)
    shutil.copytree(made.parent, tmp_path / "cde")
    return tmp_path / "cde" / made.name


def settings(folder: Path, **encoder: Any) -> IngestConfig:
    own: dict[str, Any] = {
        "window_tokens": 40,
        "window_overlap_tokens": 8,
        "use_context": True,
        "query_prefix": "search_query: ",
        "document_prefix": "search_document: ",
        "precision": "fp32",
    }
    return small_ingests.settings(folder, context_documents=6, **{**own, **encoder})


def source(tmp_path: Path, texts: list[str] = TEXTS) -> list[str]:
    return [small_ingests.write_texts(tmp_path / "corpus.parquet", texts)]


def stored_context(root: Path) -> ContextSet:
    return ContextSet.read(open_generation(CollectionLayout(root, "c")).folder / "context.arrow")


def change_weight(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.ones_like(tensors[name])}, folder / "model.safetensors")


def test_ingest_with_context_is_searchable_in_the_vectors_of_both_stages(
    folder: Path, tmp_path: Path
) -> None:
    config = settings(folder)
    report = build_index(source(tmp_path), tmp_path / "root", "c", config)
    assert (report.indexed, report.quarantined) == (8, 0)

    backbone, context = load_backbone(config.encoder), stored_context(tmp_path / "root")
    drawn = [TEXTS[int(doc_id[1:])] for doc_id in context.doc_ids]
    first_stage = ContextEncoder(backbone.first_stage, 32, prefix="search_document: ")
    assert np.allclose(context.embeddings_CD, first_stage.embed(drawn), atol=1e-5)

    encoder = DocumentEncoder(config.encoder, context, backbone)
    query_Q = encoder.encode_queries(["stone path on the mountain"])[0]
    expected = encoder.encode(TEXTS).document_vectors_NV @ query_Q
    found = open_collection("c", root=tmp_path / "root").search(
        "stone path on the mountain", granularity="document", hybrid=False, top_k=8
    )
    assert [hit.doc_id for hit in found.hits] == [
        f"d{number}" for number in np.argsort(-expected, kind="stable")
    ]
    assert np.allclose([hit.scores["document"] for hit in found.hits], np.sort(expected)[::-1], atol=1e-5)


@pytest.mark.parametrize(
    "stage", ["first_stage_model.mlp.0.bias", "second_stage_model.output_projection.0.bias"]
)
def test_other_weights_in_either_stage_are_refused_by_a_search_and_before_a_text_is_encoded(
    stage: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(source(tmp_path), tmp_path / "root", "c", settings(folder))
    change_weight(folder, stage)
    with pytest.raises(FingerprintMismatchError, match="open the collection with its own model"):
        open_collection("c", root=tmp_path / "root").search("stone")
    monkeypatch.setattr(DocumentEncoder, "encode", lambda *_: pytest.fail("a text was encoded"))
    with pytest.raises(FingerprintMismatchError, match="must keep the model it was built with"):
        build_index(source(tmp_path, [*TEXTS, "a stone."]), tmp_path / "root", "c", settings(folder))


def test_ingest_resumed_with_another_model_in_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with small_ingests.stopped_at("context-written"):
        build_index(source(tmp_path), tmp_path / "root", "c", settings(folder))
    change_weight(folder, "first_stage_model.mlp.0.bias")
    with pytest.raises(
        FingerprintMismatchError, match="must go on with the model it began with, got other weights"
    ):
        build_index(source(tmp_path), tmp_path / "root", "c", settings(folder))


def test_ingest_without_context_takes_any_number_of_context_documents(folder: Path, tmp_path: Path) -> None:
    config = replace(
        settings(folder, use_context=False),
        context=ContextConfig(context_documents=7, max_document_tokens=32),
    )
    assert build_index(source(tmp_path), tmp_path / "root", "c", config).indexed == 8
    hits = open_collection("c", root=tmp_path / "root").search("stone path").hits
    assert {hit.doc_id for hit in hits} == {f"d{number}" for number in range(8)}


def context_set(count: int, width: int = 32) -> ContextSet:
    return ContextSet(
        doc_ids=tuple(f"c{number}" for number in range(count)),
        content_sha256s=("0" * 64,) * count,
        cluster_ids_C=np.zeros(count, np.int32),
        embeddings_CD=np.random.default_rng(0).normal(size=(count, width)).astype(np.float32),
        first_stage_fingerprint="first",
    )


@pytest.mark.parametrize("kind", [DocumentEncoder, TextEncoder])
@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        (context_set(7), "at most the 6 vectors the model reads, got 7"),
        (context_set(6, width=16), r"rows of 32 numbers, got shape \(6, 16\); it was made by another model"),
    ],
    ids=["too many", "too narrow"],
)
def test_context_that_does_not_fit_is_refused_for_documents_and_queries(
    kind: Any, context: ContextSet, sentence: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(settings(folder).encoder, context)


def test_fingerprint_of_an_encoder_covers_the_order_of_its_context(folder: Path) -> None:
    context = context_set(6)
    embeddings_CD = np.ascontiguousarray(context.embeddings_CD[::-1])
    turned = replace(context, doc_ids=context.doc_ids[::-1], embeddings_CD=embeddings_CD)
    config = settings(folder).encoder
    backbone = load_backbone(config)
    one, other = (DocumentEncoder(config, each, backbone).fingerprint for each in (context, turned))
    assert one != other
