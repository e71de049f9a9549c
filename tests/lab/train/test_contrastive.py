"""Contrastive training: a step, its batch, loss and gradient, and runs from files to a served model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train import contrastive
from cairn.pipeline.lab.train.contrastive import batch_loss, draw_batch, served_interval, train
from cairn.pipeline.lab.train.gradients import cached_backward
from cairn.pipeline.lab.train.heldout import (
    choose_heldout,
    embed_texts,
    mean_by_text,
    rank_scores,
    score_heldout,
)
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import alone
from cairn.pipeline.lab.train.pair_data import PairVectors, TrainingData, pools_of_sources
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs, text_numbers
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config, settings_warnings
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from cairn.pipeline.model.landmarks import Rows
from safetensors.torch import save_file

from tests.lab.evaluate.conftest import write_set
from tests.lab.train.conftest import FAMILIES, LOOP_SETTINGS, TOPICS, tiny_new, train_step
from tests.tiny_models import context_of


def test_train_loss_falls_the_best_score_is_remembered_and_the_folder_is_served_as_trained(run, tmp_path):
    report = run(steps=30, evaluate_every=10, checkpoint_every=30)
    records = read_log(tmp_path / "run" / "log.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    held = [record for record in records if "heldout_ndcg_at_10" in record]
    scores = {record["step"]: record["heldout_ndcg_at_10"] for record in held}
    assert list(scores) == [0, 10, 20, 30]
    assert report.details["batch_cosine"] > report.details["random_cosine"]
    logged = {record["random_cosine"] for record in records if "loss" in record}
    assert logged == {report.details["random_cosine"]}
    assert report.best_score == scores[report.best_step] == max(scores.values())
    expected = {"attention": "full", "pooling": "lmk", "use_context": True, "title_tokens": 16}
    folder = str(tmp_path / "run" / "model")
    served = encoder_config({"model": folder})
    assert {name: getattr(served, name) for name in expected} == expected
    encoder = DocumentEncoder(replace(served, use_context=False))
    assert np.isfinite(encoder.encode(["cat mat"], titles=["way"]).document_vectors_NV).all()
    context = context_config(folder, {})
    assert (context.context_documents, context.max_document_tokens) == (4, 12)


def test_train_order_of_a_file_changes_nothing_where_rows_of_a_title_stay_together(run, pairs_file, tmp_path):
    settings = {"steps": 2, "hard_negatives": 2, "context_from": "source"}
    run(**settings)
    lines = pairs_file.read_text().splitlines()
    runs = [list(own) for _, own in groupby(lines, lambda line: json.loads(line)["title"])]
    pairs_file.write_text("\n".join(line for lines in reversed(runs) for line in lines))
    run("again", **settings)
    first, again = (tmp_path / name / "changes.safetensors" for name in ("run", "again"))

    assert len(runs) > 10
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(("context_documents", "attention"), [(4, "full"), (0, "full"), (4, "chunk")])
def test_train_held_out_pairs_are_scored_as_the_model_is_served_behind_a_context_of_the_others(
    run, monkeypatch, context_documents, attention
):
    shown: list[list[int]] = []

    def score(*positional: Any, context: Rows | None, **named: Any) -> dict[str, float]:
        shown.append([] if context is None else [len(context), *context.ids.tolist()])
        return score_heldout(*positional, context=context, **named)

    monkeypatch.setattr(contrastive, "score_heldout", score)
    run(steps=4, context_documents=context_documents, attention=attention)
    context, last = shown
    assert context == last
    assert (context[0] if context else 0) == context_documents


def test_train_reads_sections_of_documents_beside_pairs(one_thread, tiny_model_folder, pairs_file, tmp_path):
    body = " ".join(f"the cat sat on the old stone path {number} by the river." for number in range(9))
    text = "\n\n".join(f"# {heading}\n\n{heading} {body}" for heading in ("way", "mark", "mountain"))
    pq.write_table(pa.table({"title": ["cat"], "text": [text]}), tmp_path / "d.parquet")
    documents = [tmp_path / "d.parquet"]
    run = train([pairs_file], tmp_path / "run", config_of(), base=str(tiny_model_folder), documents=documents)
    assert run.details["pairs"] == 63


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch_pairs": 64}, "at least the 64 pairs of one batch, got 54; lower batch_pairs"),
        ({"negatives": "own"}, r"pairs must have negatives .* give a column negatives"),
        ({"matryoshka_dims": (64,)}, "must be different numbers between 1 and the base model's 32"),
        ({"matryoshka_layers": (1,)}, "must end with the model's last layer 2"),
        ({"pooling": "cls", "attention": "full"}, "pooling cls must go with attention chunk, got full"),
        ({"first_stage_layers": 3}, "must be at most the base model's 2, got 3"),
        ({"first_stage_layers": 1, "context_documents": 0}, "must go with a context that is read"),
        ({"latents": 6}, "latents must go with pooling latent, got lmk"),
    ],
)
def test_train_with_settings_that_cannot_be_is_refused_before_anything_is_written(
    run, tmp_path, settings, sentence
):
    with pytest.raises((ConfigError, SourceError), match=sentence):
        run(**settings)
    assert not (tmp_path / "run").exists()


def test_train_of_a_base_that_does_not_fit_and_of_nothing_is_refused(
    tiny_model_folder, decoder, pairs_file, tmp_path
):
    mixing = shutil.copytree(tiny_model_folder, tmp_path / "base")
    save_file({f"{MIXER_PREFIX}scale": torch.ones(1)}, mixing / "cairn_extra.safetensors")
    cls = config_of(pooling="cls", attention="chunk")
    for sources, base, config, sentence in (
        ([pairs_file], mixing, config_of(), "without dense layers and a landmark mixer"),
        ([pairs_file], decoder, cls, r"pooling cls must go with a base model that has \[CLS\] or BOS"),
        ([], tiny_model_folder, config_of(), "must have pairs or documents, got neither"),
    ):
        with pytest.raises((ModelError, ConfigError, SourceError), match=sentence):
            train(sources, tmp_path / "run", config, base=str(base))


def test_train_texts_of_no_tokens_are_trained_on_without_harm(run, pairs_file):
    nothing = [{"query": "\u200b", "document": "old stone"}, {"query": "river", "document": "\u200b\ufeff"}]
    pairs_file.write_text(pairs_file.read_text() + "".join(json.dumps(pair) + "\n" for pair in nothing))
    assert math.isfinite(run(steps=6, heldout_pairs=0).last_loss)


def test_train_pairs_of_a_judged_set_are_counted_and_left_out(run, tmp_path, pairs_file):
    query = json.loads(pairs_file.read_text().splitlines()[0])["query"]
    other, asked = {"id": "1", "text": "nothing of the kind"}, {"id": "1", "text": query.upper()}
    judged = write_set(tmp_path / "judged", [other], [asked])
    report = run(steps=1, how={"judged": (judged,)})
    assert report.details["pairs"] == 59
    assert report.skipped == {"query of an evaluation set": 1}


INSTRUCTION = "walk the old way"


@pytest.fixture
def labelled(tmp_path):
    """Return texts of three classes, each with the class it is of and those it is not."""
    path = tmp_path / "labelled.jsonl"
    names = [topic[0] for topic in TOPICS]
    records = [
        {
            "query": f"{word} {letter}",
            "document": topic[0],
            "negatives": [name for name in names if name != topic[0]],
            "instruction": INSTRUCTION,
        }
        for topic in TOPICS
        for word in topic
        for letter in "ab"
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(**{**LOOP_SETTINGS, "steps": 2, "heldout_pairs": 4, **settings})


def test_second_stage_goes_on_from_the_first_with_other_tasks_and_own_negatives(
    one_thread, tiny_model_folder, pairs_file, labelled, tmp_path, caplog
):
    first = train([pairs_file], tmp_path / "one", config_of(), base=str(tiny_model_folder))
    second = train(
        [pairs_file, labelled],
        tmp_path / "two",
        config_of(negatives="own", hard_negatives=3, query_prefix="the old: "),
        base=str(tmp_path / "one" / "best"),
    )
    assert (first.details["pairs"], second.details["pairs"]) == (60, 84)
    settings = encoder_config({"model": str(tmp_path / "two" / "best")})
    assert (settings.query_prefix, settings.document_prefix) == ("the old: ", "")
    assert not caplog.records
    unmined = config_of(negatives="own")
    train([pairs_file, labelled], tmp_path / "three", unmined, base=str(tiny_model_folder))
    assert "60 of 84 pairs have no negatives" in caplog.text


INTERVAL, WINDOW, PREFIX = 8, 40, "the old: "


def maker_of(folder: Path, pairs: TrainingPairs, served: EncoderConfig) -> SequenceMaker:
    sizes = {"max_query_tokens": 16, "max_document_tokens": 1_000}
    return SequenceMaker(read_checkpoint(folder), pairs, served, **sizes)


@pytest.mark.parametrize(
    ("attention", "pooling", "prefix", "family"),
    [
        *product(["full"], ["lmk", "mean"], [PREFIX], FAMILIES),
        *product(["chunk"], ["cls"], ["", PREFIX], FAMILIES),
        ("chunk", "mean", PREFIX, "bert"),  # which is pooled
        *product(["chunk", "full"], ["lmk", "mean"], ["", PREFIX], ["decoder without [CLS]"]),
    ],
)
def test_vectors_of_rows_are_those_that_an_ingest_gives(
    attention, pooling, prefix, family, request, tiny_model_folder, make_pairs, tmp_path
):
    if family in FAMILIES:
        folder, checkpoint = tmp_path / "model", tiny_new(family, tiny_model_folder)
        save_encoder_folder(folder, checkpoint, EncoderConfig())
    else:
        folder = request.getfixturevalue("decoder")
        checkpoint = read_checkpoint(folder)
        assert checkpoint.cls_id is None
    pairs, is_cls = make_pairs(6), pooling == "cls"
    titles, queries = ([getattr(row, name) for row in pairs.rows] for name in ("title", "query"))
    pool_prefix = (attention, pooling, family) == ("chunk", "mean", "bert")
    assert all(titles)
    model = LandmarkEncoder(checkpoint)
    context_CD = torch.randn(5, model.model_dim, generator=torch.Generator().manual_seed(1))
    for title_tokens, drawn_CD in product((0, 3), (None, context_CD)):
        config = EncoderConfig(
            model=str(folder),
            attention=attention,
            pooling=pooling,
            landmark_interval=INTERVAL,
            window_tokens=WINDOW,
            window_overlap_tokens=0,
            title_tokens=title_tokens,
            query_prefix=prefix,
            document_prefix=prefix,
            pool_prefix=pool_prefix,
            precision="fp32",
            use_context=drawn_CD is not None,
        )
        made = maker_of(folder, pairs, config)
        with torch.no_grad():
            rows, text_M = made.documents(range(6), INTERVAL)
            found = embed_texts(model, rows, text_M, 100, drawn_CD).numpy()
            asked = embed_texts(model, *made.queries(range(6), 64), 100, drawn_CD).numpy()
        context = None if drawn_CD is None else context_of(drawn_CD.numpy())
        encoder = DocumentEncoder(config, context)
        expected = encoder.encode(pairs.documents, titles=titles)
        assert np.abs(found - expected.document_vectors_NV).max() <= 1e-5
        assert np.abs(asked - encoder.encode_queries(queries)).max() <= 1e-5
    assert len(rows) > 6, "a document is longer than a row"
    if is_cls:
        assert (alone(rows, has_cls=True).pooled_start == rows.own_start).all()
    elif pool_prefix:
        assert (alone(rows, has_cls=True).pooled_start == 0).all()
    elif family not in FAMILIES and attention != "full":
        assert (rows.own_start > made.prefix_tokens).all()


@pytest.mark.parametrize(
    ("intervals", "longest", "expected"),
    [((32, 64, 128, 256), 510, 64), ((16, 32), 510, 32), ((128, 256), 510, 128), ((512,), 510, 510)],
)
def test_served_interval_is_that_of_an_ingest_or_the_nearest_trained(intervals, longest, expected):
    assert served_interval(intervals, longest) == expected


def test_context_documents_are_read_as_by_an_ingest(decoder, make_pairs):
    pairs, config = make_pairs(6), EncoderConfig(model=str(decoder), precision="fp32", document_prefix=PREFIX)
    rows = maker_of(decoder, pairs, config).context(range(6), 12)
    with torch.no_grad():
        found = LandmarkEncoder(read_checkpoint(decoder)).embed_documents(rows)
    first_stage = ContextEncoder.of(load_backbone(config), config, ContextConfig(max_document_tokens=12))
    assert np.abs(found.numpy() - first_stage.embed(pairs.documents)).max() <= 1e-5


def test_folder_brings_the_context_of_training_and_one_larger_is_said_in_a_sentence(
    tiny_model_folder, tmp_path
):
    served, folder = EncoderConfig(use_context=True), tmp_path / "model"
    trained = TrainConfig(steps=1, context_documents=64, max_context_tokens=12).context
    save_encoder_folder(folder, read_checkpoint(tiny_model_folder), served, context=trained)

    def of(stored: Any = None, **context: int) -> tuple[int, int]:
        asked = {"encoder": {"model": str(folder)}, "context": context}
        found = resolve_ingest_config(asked, stored).context
        return found.context_documents, found.max_document_tokens

    assert (of(), of(context_documents=9)) == ((64, 12), (9, 12))
    assert of({"context": {"context_documents": 7, "max_document_tokens": 5, "seed": 0}}) == (7, 5)
    encoder, brought = encoder_config({"model": str(folder)}), context_config(str(folder), {})
    assert settings_warnings(encoder, replace(brought, context_documents=9)) == ()
    larger = replace(brought, context_documents=65, max_document_tokens=13)
    (warning,) = settings_warnings(encoder, larger)
    assert "was not trained for context_documents 65, max_document_tokens 13, but for 64, 12: " in warning
    assert settings_warnings(replace(encoder, use_context=False), larger) == ()
    said = json.loads((folder / "cairn_config.json").read_text())
    for content in ({"context_documents": 0, "max_document_tokens": 3}, {"other": 1}, 5):
        (folder / "cairn_config.json").write_text(json.dumps({**said, "context": content}))
        with pytest.raises(ModelError, match="must hold context_documents and max_document_tokens, got"):
            context_config(str(folder), {})


def test_choose_heldout_takes_whole_documents_and_at_most_a_tenth():
    documents = tuple(f"d{place // 3}" for place in range(90))
    pairs = TrainingPairs(rows=tuple(PairRow(str(place), each) for place, each in enumerate(documents)))
    chosen = choose_heldout(pairs, 50)
    assert len(chosen) == 9
    assert {documents[place] for place in chosen} & {
        documents[place] for place in range(90) if place not in chosen
    } == set()
    assert len(choose_heldout(pairs, 0)) == 0
    assert np.array_equal(chosen, choose_heldout(pairs, 50))


def test_rank_scores_equal_the_measures_written_out():
    scores = np.zeros((3, 20), np.float32)
    scores[0, 4] = 1.0  # first
    scores[1, :3], scores[1, 7] = 2.0, 1.0  # fourth
    found = rank_scores(scores, np.array([4, 7, 5]))  # the last one ties with all: beyond ten
    assert found["heldout_mrr_at_10"] == pytest.approx((1 + 1 / 4) / 3)
    assert found["heldout_ndcg_at_10"] == pytest.approx((1 + 1 / np.log2(5)) / 3)
    scores = np.array([[np.nan] * 3, [np.nan, 0.5, 0.1]], np.float32)  # the second stands behind a NaN
    assert rank_scores(scores, np.array([0, 1]))["heldout_mrr_at_10"] == (0 + 1 / 2) / 2


@pytest.mark.parametrize("served", ["lmk", "mean"])
def test_a_base_that_pools_as_is_trained_teaches_what_it_makes_of_whole_rows(
    served, one_thread, tiny_model_folder, pairs_file, tmp_path
):
    settings = EncoderConfig(pooling=served, attention="full")
    save_encoder_folder(tmp_path / "base", read_checkpoint(tiny_model_folder), settings)

    def first_loss(weight: float) -> float:
        config = config_of(steps=1, context_documents=0, distillation_weight=weight)
        folder = tmp_path / f"run-{weight}"
        train([pairs_file], folder, config, base=str(tmp_path / "base"))
        return next(record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record)

    follows_itself = first_loss(1.0) == pytest.approx(first_loss(0.0), abs=1e-5)
    assert follows_itself == (served == "lmk")


@pytest.fixture
def data(tiny_model_folder, make_pairs):
    pairs = make_pairs(24)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, 24, 5)).astype(np.float32)
    served = EncoderConfig(pooling="lmk", attention="full")
    sizes = {"max_query_tokens": 16, "max_document_tokens": 64}
    maker = SequenceMaker(read_checkpoint(tiny_model_folder), pairs, served, **sizes)
    return (
        TrainingData(
            maker=maker,
            vectors=PairVectors(document_NV=vectors[0], query_NV=vectors[1]),
            document_number_N=text_numbers(pairs.documents),
            hard_negatives_Nk=np.zeros((24, 0), np.int64),
        ),
        list(make_units(pairs, range(len(pairs)), 3)),
    )


def step_config(**settings: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "steps": 9,
            "context_documents": 6,
            "max_context_tokens": 12,
            "context_absence": 0.0,
        }
        | settings
    )


def gradients(
    folder: Path,
    data: tuple[TrainingData, list[tuple[int, ...]]],
    config: TrainConfig,
    step: int = 0,
    teacher: bool = True,
    max_norm: float = 1e9,
) -> tuple[Any, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    model = LandmarkEncoder(
        read_checkpoint(folder),
        first_stage_layers=config.first_stage_layers,
        null_token=config.context_dropout > 0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    taught_by = LandmarkEncoder(read_checkpoint(folder)).requires_grad_(False) if teacher else None
    report = train_step(model, taught_by, data[0], data[1], step, config, max_norm)
    return report, {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("dims", "layers", "first_stage_layers", "context_dropout"),
    [
        ((), (), 0, 0.0),
        ((), (1, 2), 0, 0.4),
        ((), (), 1, 0.4),
        ((8, 32), (), 1, 0.0),
        ((8, 32), (1, 2), 0, 0.4),
    ],
)
def test_train_step_in_micro_batches_gives_the_gradient_of_the_whole(
    tiny_model_folder, data, dims, layers, first_stage_layers, context_dropout, monkeypatch
):
    settings = {
        "matryoshka_dims": dims,
        "matryoshka_layers": layers,
        "first_stage_layers": first_stage_layers,
        "context_dropout": context_dropout,
    }
    rows: list[int] = []
    forward = LandmarkEncoder.forward

    def counted(self: LandmarkEncoder, batch: Rows, *context: Any, **how: Any) -> torch.Tensor:
        rows.append(len(batch))
        return forward(self, batch, *context, **how)

    monkeypatch.setattr(LandmarkEncoder, "forward", counted)
    whole, expected = gradients(tiny_model_folder, data, step_config(micro_batch_tokens=100_000, **settings))
    assert len(rows) == 2, "the teacher and the model, once"
    for tokens in (60, 90):  # with 90 the context is one micro-batch and the rows are several
        rows.clear()
        parts, found = gradients(tiny_model_folder, data, step_config(micro_batch_tokens=tokens, **settings))
        third = len(rows) // 3
        assert rows[third : 2 * third] == rows[2 * third :], "the model twice"
        assert third > 5
        assert parts.loss == pytest.approx(whole.loss, abs=1e-4)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            most = 2e-4 * max(1.0, float(gradient.abs().max()))
            assert float((found[name] - gradient).abs().max()) <= most, name


def test_train_step_reaches_the_null_token_and_every_weight(tiny_model_folder, data):
    report, found = gradients(tiny_model_folder, data, step_config(context_dropout=0.5))
    assert 1 <= report.num_context <= 6
    assert {
        name for name, _ in LandmarkEncoder(read_checkpoint(tiny_model_folder)).named_parameters()
    } == set(found)


def test_train_step_loss_of_widths_and_layers_is_their_mean(tiny_model_folder, data):
    def loss(dims: tuple[int, ...], layers: tuple[int, ...]) -> float:
        config = step_config(matryoshka_dims=dims, matryoshka_layers=layers)
        return gradients(tiny_model_folder, data, config, teacher=False)[0].loss

    assert loss((8, 32), (2,)) == pytest.approx((loss((8,), (2,)) + loss((32,), (2,))) / 2, rel=1e-5)
    assert loss((32,), (1, 2)) == pytest.approx((loss((32,), (1,)) + loss((32,), (2,))) / 2, rel=1e-5)


def test_train_step_gradient_is_clipped(tiny_model_folder, data):
    report, found = gradients(tiny_model_folder, data, step_config(), max_norm=0.01)
    assert report.gradient_norm > 0.01
    assert sum(float(gradient.pow(2).sum()) for gradient in found.values()) ** 0.5 == pytest.approx(
        0.01, rel=1e-3
    )


def test_train_step_in_bf16_is_near_fp32(tiny_model_folder, data):
    exact, _ = gradients(tiny_model_folder, data, step_config())
    rounded, _ = gradients(tiny_model_folder, data, step_config(precision="bf16"))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.loss != exact.loss


def test_draw_batch_context_is_absent_in_its_share_of_steps(data):
    config = step_config(context_absence=0.5)
    contexts = [
        draw_batch(data[0], data[1], np.random.default_rng(step), config, 96)[1] for step in range(60)
    ]
    assert 15 < sum(context is None for context in contexts) < 45
    assert {len(context) for context in contexts if context is not None} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("negatives", "margin"),
    [("batch", 0.0), ("batch", -0.5), ("batch", math.inf), ("own", 0.0), ("own", 2.0)],
)
def test_query_is_ranked_against_the_batch_below_the_margin_or_its_own_negatives_alone(
    data, negatives, margin
):
    """The oracle: softmax over the documents that are left, query by query."""
    mined = np.full((24, 2), -1)
    mined[[0, 1, 2]] = [[20, 21], [20, -1], [9, 21]]
    training = replace(data[0], hard_negatives_Nk=mined)
    config = step_config(negatives=negatives, margin=margin)
    batch, _ = draw_batch(training, [(0, 1), (2, 3)], np.random.default_rng(0), config, 96)
    assert batch.pair_D.tolist() == [0, 1, 2, 3, 20, 21, 9], "mined ones stand behind the documents"
    embeddings_BD = torch.randn(len(batch.text_B), 8, generator=torch.Generator().manual_seed(0))
    texts = mean_by_text(embeddings_BD, batch.text_B, 11)
    said_QN = training.vectors.query_NV[:4] @ training.vectors.document_NV[batch.pair_D].T
    losses: list[float] = []
    for query, positive in enumerate(batch.positive_Q.tolist()):
        is_left_N = said_QN[query] < said_QN[query, positive] + margin
        if negatives == "own":
            is_left_N = np.isin(batch.pair_D, mined[query])
        is_left_N[positive] = True
        left = np.flatnonzero(is_left_N).tolist()
        scores = (texts[4:][left] @ texts[query] / config.temperature).log_softmax(0)
        losses.append(-float(scores[left.index(positive)]))
    found = batch_loss(embeddings_BD, batch, training, None, config, 8)
    assert float(found) == pytest.approx(np.mean(losses), rel=1e-5)


def test_draw_batch_context_is_of_all_documents_of_the_batch_s_one_source(data, make_pairs, monkeypatch):
    training, pairs, drawn = data[0], make_pairs(24), list[list[int]]()
    monkeypatch.setattr(training.maker, "context", lambda positions, _: drawn.append(positions))
    of_sources = replace(training, pool_of_pair=pools_of_sources(pairs, np.array([3, 4])))
    config = step_config(context_documents=20)
    assert [pairs.rows[place].source for place in (0, 1, 12)] == ["s0", "s0", "s1"]
    for units in ([(0, 1), (6, 7)], [(0, 1), (12, 13)]):  # a batch of two sources is of no corpus
        draw_batch(of_sources, units, np.random.default_rng(0), config, 96)
    (context,) = drawn
    assert len(set(context)) == len(context)
    assert set(context) - {0, 1, 6, 7}
    assert set(context) <= {*range(12)} - {3, 4}


def test_single_interval_cuts_every_sequence_alike(data):
    training, units = data
    config = step_config(landmark_intervals=(16,), context_documents=0, title_share=0.0)
    batch, _ = draw_batch(training, units, np.random.default_rng(0), config, 512)
    alike = training.maker.documents(batch.pair_D.tolist(), 16)[0]
    assert len(batch.rows) - len(batch.pair_Q) == len(alike)
    assert batch.rows.num_own.max() == 16


def test_what_is_frozen_or_not_compared_is_handed_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    second = [lambda context_CD: (weight * context_CD, 2 * weight[None])] * 2
    cached_backward([lambda: torch.ones(2, 3)], second, lambda embedded: embedded[0].sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]
