from __future__ import annotations

from dataclasses import replace

import numpy as np
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.lab.evaluate.contexts import corpus_context, random_context
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements
from cairn.pipeline.model.backbone_loader import load_backbone


def test_corpus_context_does_not_read_queries_or_judgements(judged, tiny_config):
    backbone = load_backbone(tiny_config)
    others = replace(judged, query_ids=("z",), queries=("something else",), judgements=Judgements.none())
    first, second = (
        corpus_context(a_set, ContextConfig(context_documents=2), backbone, tiny_config)
        for a_set in (judged, others)
    )

    assert first.fingerprint == second.fingerprint
    assert len(first.doc_ids) == 2
    assert set(first.doc_ids) <= set(judged.doc_ids)


def test_random_context_is_as_large_as_the_corpus_allows(judged, tiny_config):
    context = random_context(
        judged, ContextConfig(context_documents=512), load_backbone(tiny_config), tiny_config
    )

    assert len(context.doc_ids) == len(judged.doc_ids)
    assert not set(context.doc_ids) & set(judged.doc_ids)


def test_corpus_context_of_a_first_stage_of_its_own_stands_behind_the_documents_prefix(judged, make_cde):
    plain, behind = (
        EncoderConfig(model=str(make_cde(1)), document_prefix=prefix) for prefix in ("", "search_document: ")
    )
    first, second = (
        corpus_context(judged, ContextConfig(context_documents=3), load_backbone(config), config)
        for config in (plain, behind)
    )

    assert first.doc_ids == second.doc_ids
    assert not np.allclose(first.embeddings_CD, second.embeddings_CD)
