"""A short query is encoded on one thread, and everything else as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode import documents
from cairn.pipeline.encode.documents import DocumentEncoder


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("queries", "threads"), [(["a stone"], 1), (["a stone"] * 200, 2)])
def test_short_queries_are_encoded_on_one_thread(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, queries: list[str], threads: int
) -> None:
    seen: list[int] = []
    embedding = documents.embed_chunks

    def listening(*args: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return embedding(*args, **options)

    monkeypatch.setattr(documents, "embed_chunks", listening)
    DocumentEncoder(
        EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        )
    ).encode_queries(queries)
    assert seen == [threads]
    assert torch.get_num_threads() == 2
