from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.lab.evaluate.encoding_cache import cache_file, read_encoded, write_encoded
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, Encoding, build_encoder
from cairn.pipeline.lab.evaluate.retrieval_set import read_retrieval_set, sample_set


def test_encoded_set_read_back_is_the_same(tmp_path, encoded):
    write_encoded(tmp_path / "cache" / "x.npz", encoded)
    read = read_encoded(tmp_path / "cache" / "x.npz")

    assert read is not None
    for field in fields(EncodedSet):
        before, after = getattr(encoded, field.name), getattr(read, field.name)
        assert np.array_equal(before, after)
        assert type(before) is type(after)


def test_absent_file_is_nothing(tmp_path):
    assert read_encoded(tmp_path / "none.npz") is None


@pytest.mark.parametrize("kept", [0, 10, 500])
def test_damaged_file_is_nothing(tmp_path, encoded, kept):
    write_encoded(tmp_path / "x.npz", encoded)
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:kept])

    assert read_encoded(tmp_path / "x.npz") is None


def test_name_differs_where_a_vector_may(tmp_path, judged, write, tiny_config):
    def name(a_set, encoding):
        encoder, _ = build_encoder(a_set, encoding, ContextConfig(context_documents=2))
        return cache_file(tmp_path, a_set, encoding, encoder).name

    plain = Encoding(encoder=tiny_config)
    reading = replace(tiny_config, use_context=True)
    fewer = sample_set(judged, max_queries=2, max_documents=None, seed=0)
    retitled = read_retrieval_set(
        write(tmp_path / "other", [{**row, "title": "x"} for row in corpus_of(judged)])
    )
    names = [
        name(judged, plain),
        name(judged, replace(plain, has_titles=True)),
        name(retitled, replace(plain, has_titles=True)),
        name(judged, replace(plain, max_document_tokens=9)),
        name(judged, Encoding(encoder=reading, context="corpus")),
        name(judged, Encoding(encoder=reading, context="random")),
        name(judged, Encoding(encoder=replace(reading, whitening=0.3), context="corpus")),
        name(judged, replace(plain, encoder=replace(tiny_config, temperature=0.9))),
        name(judged, replace(plain, encoder=replace(tiny_config, precision="bf16"))),
        name(fewer, plain),
    ]

    assert len(set(names)) == len(names)
    assert name(retitled, plain) == names[0]


def corpus_of(judged) -> list[dict[str, str]]:
    return [{"id": doc_id, "text": text} for doc_id, text in zip(judged.doc_ids, judged.texts, strict=True)]
