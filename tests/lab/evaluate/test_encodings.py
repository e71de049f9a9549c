from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.cluster.sampling import SAMPLE_TEXT_CHARACTERS
from cairn.pipeline.config import ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.lab.evaluate import encodings
from cairn.pipeline.lab.evaluate.encodings import (
    EncodedSet,
    Encoding,
    build_encoder,
    corpus_context,
    encode_set,
    only_cut,
    random_context,
)
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.types import silent_progress

from tests.lab.evaluate.conftest import write_set
from tests.small_ingests import ingest_rows, text_of


def encode(judged: RetrievalSet, encoding: Encoding, cache: Path | None = None) -> EncodedSet:
    encoder, _ = build_encoder(judged, encoding, ContextConfig(context_documents=3))
    return encode_set(judged, encoding, encoder, silent_progress, cache=cache)


def test_plain_encoding_is_that_of_the_document_encoder(judged, tiny_config):
    encoded, encoder = encode(judged, Encoding(encoder=tiny_config)), DocumentEncoder(tiny_config)
    expected = encoder.encode(judged.texts)

    assert np.array_equal(encoded.document_vectors_NV, expected.document_vectors_NV)
    assert np.array_equal(encoded.chunk_vectors_MV, expected.chunk_vectors_MV)
    assert np.array_equal(encoded.query_vectors_QV, encoder.encode_queries(judged.queries))
    assert encoded.tokens == expected.num_tokens.sum()


@pytest.mark.parametrize(("has_titles", "stride"), [(True, None), (False, 8), (True, 8)])
def test_pieces_are_chunks_or_two_neighbouring_ones_each_a_text_of_its_own_behind_its_title(
    judged, tiny_config, has_titles, stride
):
    whole = replace(tiny_config, landmark_interval=16 if stride else 8)
    encoding = Encoding(encoder=whole, has_titles=has_titles, stride_tokens=stride)
    encoded, chunks = encode(judged, encoding), encode(judged, Encoding(encoder=tiny_config))
    texts: list[str] = []
    for document, title in enumerate(judged.titles):
        own, part = encoded.chunk_document == document, chunks.chunk_document == document
        count = max(part.sum() - 1, 1) if stride else part.sum()
        assert encoded.start_char[own].tolist() == chunks.start_char[part][:count].tolist()
        assert encoded.end_char[own].tolist() == chunks.end_char[part][-count:].tolist()
        head = f"{title}\n" if has_titles and title else ""
        spans = zip(encoded.start_char[own].tolist(), encoded.end_char[own].tolist(), strict=True)
        texts += [head + judged.texts[document][start:end] for start, end in spans]
        mean_V = encoded.chunk_vectors_MV[own].sum(axis=0)
        assert encoded.document_vectors_NV[document] == pytest.approx(
            mean_V / np.linalg.norm(mean_V), abs=1e-6
        )
    room = DocumentEncoder(replace(tiny_config, landmark_interval=62))
    assert encoded.chunk_vectors_MV == pytest.approx(room.encode(texts).document_vectors_NV, abs=1e-6)
    cut = only_cut(judged, encoding)
    for name in ("chunk_offsets", "start_char", "end_char"):
        assert np.array_equal(getattr(cut, name), getattr(encoded, name))
    assert cut.chunk_vectors_MV.shape == (len(encoded.chunk_vectors_MV), 0)


def test_contexts_move_vectors_each_in_its_own_way(judged, tiny_config):
    reading = Encoding(encoder=replace(tiny_config, use_context=True), context="random")
    settings = (Encoding(encoder=tiny_config), reading, replace(reading, context="corpus"))
    (none, random, corpus), (_, *again) = ([encode(judged, each) for each in settings] for _ in range(2))

    for one, other in ((none, random), (none, corpus), (random, corpus)):
        assert not np.allclose(one.document_vectors_NV, other.document_vectors_NV)
    assert not np.allclose(none.query_vectors_QV, corpus.query_vectors_QV)
    for first, second in zip((random, corpus), again, strict=True):
        assert np.array_equal(first.document_vectors_NV, second.document_vectors_NV)


@pytest.mark.parametrize("kept_bytes", [None, 0, 10, 500])
def test_kept_set_is_read_back_and_a_damaged_one_encoded_again(
    judged, tiny_config, tmp_path, monkeypatch, kept_bytes
):
    encoding = Encoding(encoder=tiny_config)
    before = encode(judged, encoding, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    if kept_bytes is None:
        monkeypatch.setattr(encodings, "encoded_arrays", lambda *_: pytest.fail("encoded again"))
    else:
        file.write_bytes(file.read_bytes()[:kept_bytes])
    after = encode(judged, encoding, tmp_path / "cache")

    for field in fields(EncodedSet):
        if field.name != "query_seconds" and (kept_bytes is None or field.name != "encode_seconds"):
            one, other = getattr(before, field.name), getattr(after, field.name)
            assert np.array_equal(one, other)
            assert type(one) is type(other)


def test_kept_sets_have_names_of_their_own_where_a_vector_may_differ(judged, tiny_config, tmp_path):
    rows = zip(judged.doc_ids, judged.texts, strict=True)
    retitled = read_retrieval_set(
        write_set(tmp_path / "other", [{"id": doc_id, "text": text, "title": "x"} for doc_id, text in rows])
    )
    plain = Encoding(encoder=tiny_config)
    reading, longer = replace(tiny_config, use_context=True), replace(tiny_config, landmark_interval=16)
    different = [
        (judged, plain),
        (judged, replace(plain, has_titles=True)),
        (retitled, replace(plain, has_titles=True)),
        *((judged, Encoding(encoder=longer, stride_tokens=stride)) for stride in (None, 8, 16)),
        *((judged, Encoding(encoder=reading, context=kind)) for kind in ("corpus", "random")),
        (judged, replace(plain, encoder=replace(tiny_config, temperature=0.9))),
        (judged, replace(plain, encoder=replace(tiny_config, precision="bf16"))),
    ]
    for a_set, encoding in (*different, (retitled, plain)):
        encode(a_set, encoding, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == len(different)


def test_random_context_is_as_large_as_the_corpus_allows(judged, tiny_config):
    config = ContextConfig(context_documents=512)
    random = random_context(judged, config, load_backbone(tiny_config), tiny_config)
    assert len(random.doc_ids) == len(judged.doc_ids)
    assert not set(random.doc_ids) & set(judged.doc_ids)


def test_corpus_context_is_the_one_that_an_ingest_of_the_set_draws(tiny_config, tmp_path):
    reading = replace(tiny_config, use_context=True)
    rows = [{"id": f"d{number}", "title": "", "text": text_of(number, 900)} for number in range(12)]
    config = IngestConfig(encoder=reading, context=ContextConfig(context_documents=5))
    ingest_rows(rows, tmp_path, config)
    drawn = ContextSet.read(open_generation(CollectionLayout(tmp_path, "c")).folder / "context.arrow")
    judgement = {"query_id": "q", "doc_id": "d0", "score": 1}
    asked = write_set(tmp_path / "set", rows, [{"id": "q", "text": "old stones"}], [judgement])
    judged = read_retrieval_set(asked)
    context = corpus_context(judged, config.context, load_backbone(reading), reading)

    assert min(len(row["text"]) for row in rows) > SAMPLE_TEXT_CHARACTERS
    assert context.doc_ids == drawn.doc_ids
    assert np.array_equal(context.cluster_ids_C, drawn.cluster_ids_C)
    assert np.array_equal(context.embeddings_CD, drawn.embeddings_CD)


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
