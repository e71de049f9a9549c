from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.context_ablation import CONTEXT_TOKENS, ablate_context
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.measures import NDCG
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.lab.evaluate.significance import compare_paired
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE

WORDS = ("cat", "mat", "river", "mountain", "stone", "path", "mark", "walk", "old", "way")


@pytest.fixture
def judged(tmp_path: Path, write) -> RetrievalSet:
    corpus = [
        {"id": f"{one}-{two}", "text": f"the {one} and the {two} " * 3, "title": one}
        for one in WORDS
        for two in WORDS[:2]
    ]
    queries = [{"id": word, "text": f"where is the {word}"} for word in WORDS]
    qrels = [{"query_id": word, "doc_id": f"{word}-cat", "score": 1} for word in WORDS]
    return read_retrieval_set(write(tmp_path / "s", corpus, queries, qrels))


def test_ablation_compares_each_context_with_the_one_that_is_served(
    judged: RetrievalSet, tiny_config: EncoderConfig
):
    encoder = replace(tiny_config, use_context=True)
    served = ContextConfig(context_documents=6, max_document_tokens=64)
    rows = ablate_context(judged, encoder, served, seed=3)
    assert [(row.name, row.context_documents, row.max_document_tokens) for row in rows] == [
        ("as served", 6, 64),
        ("none", 0, 0),
        ("random", 6, 64),
        ("8 documents", 8, 64),
        *((f"{tokens} tokens", 6, tokens) for tokens in CONTEXT_TOKENS if tokens != 64),
    ]
    assert rows[0].comparison is None
    values = []
    for encoding in (Encoding(encoder=encoder, context="corpus"), Encoding(encoder=encoder.without_context)):
        (result,) = run_bench(judged, [System(name="x", encoding=encoding, ranking="fused")], served)
        values.append(result.values[NDCG])
    assert rows[0].ndcg == pytest.approx(float(values[0].mean()))
    assert rows[1].comparison == compare_paired(values[1], values[0], seed=3)


def test_tied_row_is_that_of_the_model_without_its_first_stage(
    judged: RetrievalSet, tiny_config: EncoderConfig, tmp_path: Path
):
    model = LandmarkEncoder(read_checkpoint(Path(tiny_config.model)), first_stage_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    checkpoint = read_checkpoint(Path(tiny_config.model))
    whole = {**checkpoint.tensors, **model.published_tensors()}
    second = {name: tensor for name, tensor in whole.items() if not name.startswith(FIRST_STAGE)}
    for name, tensors in (("untied", whole), ("tied", second)):
        save_encoder_folder(tmp_path / name, replace(checkpoint, tensors=tensors), tiny_config)
    untied, tied = (
        ablate_context(
            judged,
            replace(tiny_config, model=str(tmp_path / name), use_context=True, attention="landmark"),
            ContextConfig(context_documents=6, max_document_tokens=64),
            seed=3,
        )
        for name in ("untied", "tied")
    )
    assert [row.name for row in untied if row.name not in {row.name for row in tied}] == ["tied"]
    (row,) = (row for row in untied if row.name == "tied")
    assert row.ndcg == pytest.approx(tied[0].ndcg)


def test_ablation_of_a_model_without_a_context_is_refused(judged: RetrievalSet, tiny_config: EncoderConfig):
    with pytest.raises(ConfigError, match="must go with a model that reads a context"):
        ablate_context(judged, tiny_config.without_context, ContextConfig(), seed=0)
