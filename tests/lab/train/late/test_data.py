from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train import late as late_data
from cairn.pipeline.lab.train.late import draw_batches, embed_pairs, means_of
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import LateConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.types import silent_progress

CONFIG = LateConfig(batch_queries=4, max_batches=6, hold_out=0.2)


def test_batches_are_neighbours_of_one_source_with_different_documents(
    make_pairs: Callable[..., TrainingPairs],
):
    pairs = make_pairs(60)
    drawn = draw_batches(pairs, CONFIG)
    place = {pair: number for number, pair in enumerate(zip(pairs.queries, pairs.documents, strict=True))}
    for start in range(0, len(drawn), 4):
        own = range(start, start + 4)
        places = [place[drawn.queries[number], drawn.documents[number]] for number in own]
        assert len({drawn.sources[number] for number in own}) == 1
        assert len({drawn.documents[number] for number in own}) == 4
        assert places == sorted(places)
    assert drawn.skipped["pair beyond max_batches"] == 60 - len(drawn)


def test_too_few_pairs_for_two_batches_are_refused(make_pairs: Callable[..., TrainingPairs]):
    with pytest.raises(SourceError, match="needs at least 2 batches of 40 pairs"):
        draw_batches(make_pairs(45), LateConfig(batch_queries=40))


def test_states_are_embedded_once_and_a_damaged_cache_again(
    make_pairs: Callable[..., TrainingPairs],
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    pairs = draw_batches(make_pairs(60), CONFIG)
    settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32", batch_tokens=256)
    backbone = load_backbone(settings)
    calls: list[int] = []
    original = late_data.embed_tokens

    def counting(*arguments: Any, **settings: Any):
        calls.append(1)
        return original(*arguments, **settings)

    monkeypatch.setattr(late_data, "embed_tokens", counting)

    def embed():
        return embed_pairs(pairs, backbone, CONFIG, settings, cache=tmp_path, progress=silent_progress)

    first, second = embed(), embed()
    assert len(calls) == 2
    assert np.array_equal(first.documents.states_TV, second.documents.states_TV)
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    assert np.array_equal(embed().queries.states_TV, first.queries.states_TV)
    assert len(calls) == 4


def test_held_out_documents_are_mined_by_no_query(
    make_pairs: Callable[..., TrainingPairs], tiny_model_folder: Path
):
    pairs = draw_batches(make_pairs(60), CONFIG)
    settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32", batch_tokens=256)
    data = embed_pairs(pairs, load_backbone(settings), CONFIG, settings, cache=None, progress=silent_progress)

    assert not set(data.batches[0]) & set(data.mined_Nk.ravel().tolist())
    assert np.linalg.norm(means_of(data.documents), axis=1) == pytest.approx(1.0, abs=1e-3)


def test_states_are_those_a_search_and_an_ingest_make_behind_their_prefixes(
    make_pairs: Callable[..., TrainingPairs], tiny_model_folder: Path
):
    settings = EncoderConfig(
        model=str(tiny_model_folder),
        precision="fp32",
        batch_tokens=256,
        landmark_interval=64,
        attention="chunk",
        use_context=False,
        query_prefix="the cat: ",
        document_prefix="a stone: ",
    )
    pairs = draw_batches(make_pairs(60), CONFIG)
    served = DocumentEncoder(settings)
    data = embed_pairs(pairs, served.backbone, CONFIG, settings, cache=None, progress=silent_progress)
    _, tokens = served.encode_query_tokens(pairs.queries)
    turned = DocumentEncoder(replace(settings, query_prefix=settings.document_prefix))
    _, document_tokens = turned.encode_query_tokens(pairs.documents)

    for states, expected in ((data.queries, tokens), (data.documents, document_tokens)):
        for text, one in enumerate(expected):
            np.testing.assert_allclose(states.states_TV[states.of(text)], one.states_TD, atol=2e-3)


def test_pairs_without_a_token_are_refused(make_pairs: Callable[..., TrainingPairs], tiny_model_folder: Path):
    settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32")
    pairs = draw_batches(make_pairs(60), CONFIG)
    blank = replace(pairs, documents=tuple("\x01" for _ in pairs.documents))

    with pytest.raises(SourceError, match="documents of the training pairs must hold tokens, got none"):
        embed_pairs(blank, load_backbone(settings), CONFIG, settings, cache=None, progress=silent_progress)
