"""Claims of late."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.train import late as late_data
from cairn.pipeline.lab.train.late import LateReport, draw_batches, embed_pairs, means_of, train_late
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import LateConfig
from cairn.pipeline.lab.train.token_head import LateBatch, late_loss, max_sims, pool_padded
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.token_vectors.projection import TokenProjection, read_token_projection
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


LENGTHS = torch.tensor([5, 1, 7, 4])


def states(rows: int, tokens: int, seed: int = 0, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, tokens, width, generator=generator), dim=-1)


def inside(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.arange(tokens) < lengths[:, None]


def batch_of(query: torch.Tensor, document: torch.Tensor) -> LateBatch:
    return LateBatch(
        query_QqD=query,
        query_ids_Qq=torch.zeros(query.shape[:2], dtype=torch.int64),
        is_query_Qq=torch.ones(query.shape[:2], dtype=torch.bool),
        document_NtD=document,
        is_document_Nt=inside(LENGTHS, document.shape[1]),
        is_left_out_QN=torch.zeros(len(query), len(document), dtype=torch.bool),
    )


def test_max_sims_equal_the_weighted_mean_of_best_cosines_written_out():
    query, document = states(3, 4, 1), states(4, 7, 2)
    weight = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    found = max_sims(query, weight, document, inside(LENGTHS, 7))
    for q in range(3):
        for n in range(4):
            own = document[n, : LENGTHS[n]]
            best = torch.stack([(own @ token).max() for token in query[q]])
            assert float(found[q, n]) == pytest.approx(
                float((weight[q] * best).sum() / weight[q].sum()), abs=1e-5
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pooled_neighbours_hold_no_token_beyond_the_text(size: int):
    document = states(4, 7, 2)
    pooled, held = pool_padded(document, inside(LENGTHS, 7), size)
    for n in range(4):
        own = document[n, : LENGTHS[n]]
        expected = [F.normalize(part.mean(0), dim=0) for part in own.split(size)]
        assert int(held[n].sum()) == len(expected)
        torch.testing.assert_close(pooled[n, : len(expected)], torch.stack(expected))


def test_late_loss_of_the_teacher_itself_is_the_contrast_alone():
    batch = batch_of(states(3, 4, 1), states(4, 7, 2))
    scores = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    loss, terms = late_loss(scores, scores, batch.is_left_out_QN, LateConfig(distillation_weight=0.7))

    assert terms["ranking"] == pytest.approx(0.0, abs=1e-6)
    assert loss.item() == pytest.approx(0.3 * terms["contrast"])


def test_late_loss_a_document_left_out_is_no_negative():
    batch = batch_of(states(2, 4, 1), states(4, 7, 2))
    batch.is_left_out_QN[0, 3] = True
    scores = torch.tensor([[0.5, 0.1, 0.2, 0.9], [0.1, 0.5, 0.2, 0.3]])
    config = LateConfig(distillation_weight=0.0, temperature=0.1)
    loss, _ = late_loss(scores, scores, batch.is_left_out_QN, config)
    expected = -(scores[0, :3] / 0.1).log_softmax(0)[0] - (scores[1] / 0.1).log_softmax(0)[1]

    assert loss.item() == pytest.approx(expected.item() / 2, abs=1e-5)


SETTINGS: dict[str, Any] = {
    "steps": 30,
    "dims": 8,
    "batch_queries": 6,
    "max_batches": 8,
    "hold_out": 0.2,
    "evaluate_every": 10,
    "peak_lr": 1e-2,
    "warmup_steps": 2,
}


@pytest.fixture
def run(pairs_file: Path, tiny_model_folder: Path, tmp_path: Path, one_thread: None):
    def start(name: str = "late", **settings: Any) -> LateReport:
        return train_late(
            [pairs_file],
            tmp_path / name,
            LateConfig(**{**SETTINGS, **settings}),
            base=str(tiny_model_folder),
            precision="fp32",
        )

    return start


def read(folder: Path, base: Path) -> TokenProjection:
    backbone = load_backbone(EncoderConfig(model=str(base)))
    found = read_token_projection(
        folder,
        model_dim=backbone.model_dim,
        vocabulary_size=backbone.tokenizer.get_vocab_size(),
        weights_sha256=read_checkpoint(base).weights_sha256,
    )
    assert found is not None
    return found


def test_train_late_lowers_the_loss_and_leaves_a_projection_for_the_base(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    report = run()
    projection = read(tmp_path / "late", tiny_model_folder)
    log = [json.loads(line) for line in (tmp_path / "late.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]

    assert projection.matrix_DV.shape == (32, 8)
    assert projection.pool_tokens == 1
    assert (report.first_loss, report.last_loss) == (losses[0], losses[-1])
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    assert report.best_score == max(record["heldout_hit"] for record in log if "heldout_hit" in record)


def test_train_late_begins_at_principal_directions_and_idf(run: Any, tmp_path: Path, tiny_model_folder: Path):
    run(steps=1, peak_lr=1e-9, term_lr=1e-9, dims=32, hold_out=0.0)
    projection = read(tmp_path / "late", tiny_model_folder)
    states = torch.nn.functional.normalize(torch.randn(20, 32), dim=1)
    projected = torch.from_numpy(projection.project(states.numpy()))

    # All principal directions keep every cosine.
    torch.testing.assert_close(projected @ projected.T, states @ states.T, atol=2e-3, rtol=0)
    weights = projection.weights_of(np.arange(len(projection.weight_codes_X)))
    assert len(np.unique(weights.round(3))) > 3


def test_train_late_nothing_held_out_keeps_the_last_step(run: Any):
    report = run(steps=3, hold_out=0.0)

    assert (report.best_step, report.best_score, report.teacher_score) == (3, None, None)


def test_train_late_more_dims_than_the_model_has_are_refused(run: Any):
    with pytest.raises(ConfigError, match="dims must be at most the base model's 32, got 64"):
        run(dims=64)


def test_train_late_that_cannot_begin_leaves_no_log(run: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match="dims must be at most"):
        run("below/late", dims=1_000)

    assert not (tmp_path / "below").exists()
    assert run("below/late", steps=1).folder == str(tmp_path / "below/late")


def test_train_late_leaves_a_folder_that_is_a_model(run: Any, tmp_path: Path, tiny_model_folder: Path):
    run(steps=1)
    encoder = load_encoder(tmp_path / "late", precision="fp32")
    base = load_encoder(tiny_model_folder, precision="fp32")

    np.testing.assert_array_equal(encoder.encode_documents(["the cat"]), base.encode_documents(["the cat"]))
    config = EncoderConfig(model=str(tmp_path / "late"))
    assert token_projection_of(config, load_backbone(config)) is not None
    encoder.save(tmp_path / "saved")
    saved = EncoderConfig(model=str(tmp_path / "saved"))
    assert token_projection_of(saved, load_backbone(saved)) is not None
