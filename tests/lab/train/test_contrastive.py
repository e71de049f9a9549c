"""Two stages (NV-Embed §3.3), prefixes and instructions: from files to a served model."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import (
    ConfigError,
    ModelError,
    SourceError,
)
from cairn.pipeline.lab.train import contrastive
from cairn.pipeline.lab.train.contrastive import TrainingData, draw_batch, served_interval, train
from cairn.pipeline.lab.train.heldout import embed_texts, score_heldout
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units, split_rows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.model.folders.own_tensors import CONTEXT_GATES, CONTEXT_SIZE
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from cairn.pipeline.model.landmark_reader import INITIAL_GATE
from cairn.pipeline.model.untrained_settings import settings_warnings
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import LOOP_SETTINGS, TOPICS, tiny_pairs
from tests.lab.train.families import FAMILIES, tiny_new


def test_train_loss_falls_and_the_best_held_out_score_is_remembered(run: Any, tmp_path: Path):
    report = run(steps=30, evaluate_every=10, checkpoint_every=30)
    records = read_log(tmp_path / "run" / "log.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    scores = {
        record["step"]: record["heldout_ndcg_at_10"] for record in records if "heldout_ndcg_at_10" in record
    }
    assert list(scores) == [0, 10, 20, 30]
    assert report.best_score == scores[report.best_step] == max(scores.values())


@pytest.mark.parametrize("context_documents", [4, 0])
def test_train_held_out_pairs_are_scored_behind_a_context_of_the_others(
    run: Any, monkeypatch: pytest.MonkeyPatch, context_documents: int
):
    shown: list[list[int] | None] = []

    def score(*positional: Any, context: PackedRows | None, **named: Any) -> dict[str, float]:
        shown.append(None if context is None else [len(context), *context.ids_N.tolist()])
        return score_heldout(*positional, context=context, **named)

    monkeypatch.setattr(contrastive, "score_heldout", score)
    run(steps=4, context_documents=context_documents)
    first, last = shown
    assert first == last
    assert (first[0] if first else 0) == context_documents


def test_train_documents_make_sequences_of_one_page_with_like_headed_sections_as_negatives(
    tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    def page(word: str) -> str:
        body = " ".join(f"the {word} sat on the old stone path by the river and the mat." for _ in range(5))
        return "\n\n".join(f"# {heading}\n\n{heading} {body}" for heading in ("way", "mark", "mountain"))

    words = ("cat", "mat", "river", "walk", "old")
    pq.write_table(
        pa.table({"id": [1, 2, 3, 4, 5], "title": list(words), "text": [page(word) for word in words]}),
        tmp_path / "d.parquet",
    )
    config = TrainConfig(**{**LOOP_SETTINGS, "steps": 2, "batch_pairs": 6, "heldout_pairs": 0})
    report = train(
        [], tmp_path / "run", config, base=str(tiny_model_folder), documents=[tmp_path / "d.parquet"]
    )
    assert report.pairs == 15
    records = [record for record in read_log(tmp_path / "run" / "log.jsonl") if "loss" in record]
    assert all(record["num_documents"] > record["num_queries"] == 6 for record in records)
    both = train(
        [pairs_file],
        tmp_path / "both",
        config,
        base=str(tiny_model_folder),
        documents=[tmp_path / "d.parquet"],
    )
    assert both.pairs == 75


def test_train_neither_pairs_nor_documents_is_refused(tiny_model_folder: Path, tmp_path: Path):
    with pytest.raises(SourceError, match="must have pairs or documents, got neither"):
        train([], tmp_path / "run", TrainConfig(steps=1), base=str(tiny_model_folder))


def test_train_fewer_pairs_than_a_batch_are_refused_before_anything_is_written(run: Any, tmp_path: Path):
    with pytest.raises(SourceError, match="at least the 64 pairs of one batch, got 54; lower batch_pairs"):
        run(batch_pairs=64)
    assert not (tmp_path / "run").exists()


def test_train_base_with_a_landmark_mixer_is_refused(
    tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    save_file({f"{MIXER_PREFIX}scale": torch.ones(1)}, base / "cairn_extra.safetensors")
    with pytest.raises(ModelError, match="without dense layers and a landmark mixer"):
        train([pairs_file], tmp_path / "run", TrainConfig(**LOOP_SETTINGS), base=str(base))


def test_train_texts_of_no_tokens_are_trained_on_without_harm(run: Any, pairs_file: Path):
    nothing = [{"query": "\u200b", "document": "old stone"}, {"query": "river", "document": "\u200b\ufeff"}]
    pairs_file.write_text(pairs_file.read_text() + "".join(json.dumps(pair) + "\n" for pair in nothing))
    assert math.isfinite(run(steps=6, heldout_pairs=0).last_loss)


def test_train_pairs_of_a_judged_set_are_counted_and_left_out(run: Any, tmp_path: Path, pairs_file: Path):
    query = json.loads(pairs_file.read_text().splitlines()[0])["query"]
    judged = tmp_path / "judged"
    judged.mkdir()
    pq.write_table(pa.table({"id": ["1"], "text": ["nothing of the kind"]}), judged / "corpus.parquet")
    pq.write_table(pa.table({"id": ["1"], "text": [query.upper()]}), judged / "queries.parquet")
    report = run(steps=1, judged=(judged,))
    assert report.pairs == 59
    assert report.skipped == {"query of an evaluation set": 1}


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        (
            {"matryoshka_dims": (64,)},
            ConfigError,
            "matryoshka_dims must be different numbers between 1 and the base model's 32",
        ),
        ({"matryoshka_layers": (1,)}, ModelError, "must end with the base model's last layer 2"),
    ],
)
def test_train_widths_and_layers_the_base_does_not_have_are_refused(
    run: Any, settings: dict[str, Any], error: type[Exception], sentence: str
):
    with pytest.raises(error, match=sentence):
        run(**settings)


def test_train_changes_beside_the_base_are_the_trained_model(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(steps=3, freeze_embeddings=True)
    overlaid = shutil.copytree(tiny_model_folder, tmp_path / "overlaid")
    shutil.copy(tmp_path / "run" / "changes.safetensors", overlaid / "cairn_extra.safetensors")
    changes = load_file(overlaid / "cairn_extra.safetensors")
    assert not any(name.startswith("embeddings.") for name in changes)
    assert any(name.startswith("encoder.") for name in changes)
    texts = ["the old stone on the path", "a river"]
    vectors = [
        DocumentEncoder(EncoderConfig(model=str(folder), attention="landmark", precision="fp32"))
        .encode(texts)
        .document_vectors_NV
        for folder in (tmp_path / "run" / "model", overlaid, tiny_model_folder)
    ]
    assert (vectors[0] * vectors[1]).sum(1).min() >= 0.9999  # apart by the rounding to bf16
    assert (vectors[0] * vectors[2]).sum(1).min() < 0.9999


def test_train_low_rank_leaves_all_but_the_layers_matrices_as_the_base_has_them(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(steps=3, lora_rank=4)
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    base = load_file(tiny_model_folder / "model.safetensors")
    moved = {name for name, tensor in base.items() if not torch.equal(tensor, trained[name])}
    assert moved == {
        name for name in base if ".layer." in name and name.endswith("weight") and "LayerNorm" not in name
    }


INSTRUCTION = "walk the old way"


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Return texts of three classes."""
    path = tmp_path / "labelled.jsonl"
    records = [
        {"query": f"{word} {letter}", "label": topic[0], "instruction": INSTRUCTION}
        for topic in TOPICS
        for word in topic
        for letter in "ab"
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(**{**LOOP_SETTINGS, "steps": 2, "heldout_pairs": 4, **settings})


def test_second_stage_goes_on_from_the_first_with_other_tasks_and_own_negatives(
    one_thread: None, tiny_model_folder: Path, pairs_file: Path, labelled: Path, tmp_path: Path
):
    first = train([pairs_file], tmp_path / "one", config_of(), base=str(tiny_model_folder))
    second = train(
        [pairs_file, labelled],
        tmp_path / "two",
        config_of(negatives="own", hard_negatives=3, class_negatives=3, query_prefix="the old: "),
        base=str(tmp_path / "one" / "best"),
    )
    assert (first.pairs, second.pairs) == (60, 84)
    settings = encoder_config({"model": str(tmp_path / "two" / "best")})
    assert (settings.query_prefix, settings.document_prefix) == ("the old: ", "")


def test_own_negatives_where_no_pair_has_any_are_refused(
    one_thread: None, tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    with pytest.raises(SourceError, match=r"pairs must have negatives .* give a column negatives"):
        train([pairs_file], tmp_path / "run", config_of(negatives="own"), base=str(tiny_model_folder))


def test_pairs_without_negatives_are_counted_where_they_teach_nothing(
    one_thread: None,
    tiny_model_folder: Path,
    pairs_file: Path,
    labelled: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING, "cairn.pipeline.lab.train.pair_data"):
        train(
            [pairs_file, labelled], tmp_path / "run", config_of(negatives="own"), base=str(tiny_model_folder)
        )
    assert "60 of 84 pairs have no negatives" in caplog.text


def test_steps_with_own_negatives_lower_the_loss_of_a_class_task(
    one_thread: None, tiny_model_folder: Path, labelled: Path, tmp_path: Path
):
    config = config_of(
        steps=20, negatives="own", distillation_weight=0.0, heldout_pairs=0, context_documents=0, peak_lr=3e-3
    )
    report = train([labelled], tmp_path / "run", config, base=str(tiny_model_folder))
    assert report.last_loss is not None
    assert report.first_loss is not None
    assert report.last_loss < 0.6 * report.first_loss


def test_queries_behind_a_prefix_are_embedded_in_training_as_at_serving(
    one_thread: None, tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    config = config_of(query_prefix="walk on: ", document_prefix="stone: ")
    train([pairs_file], tmp_path / "run", config, base=str(tiny_model_folder))
    folder = tmp_path / "run" / "model"
    settings = replace(encoder_config({"model": str(folder)}), precision="fp32", use_context=False)
    encoder = DocumentEncoder(settings, backbone=load_backbone(settings))
    pairs = read_pairs([pairs_file])
    maker = SequenceMaker(
        read_checkpoint(folder),
        pairs,
        pooling=settings.pooling,
        max_query_tokens=64,
        max_document_tokens=256,
        query_prefix=settings.query_prefix,
        document_prefix=settings.document_prefix,
    )
    model = LandmarkEncoder(read_checkpoint(folder)).requires_grad_(False)
    for rows, served in (
        (maker.queries(range(5), 64)[0], encoder.encode_queries(pairs.queries[:5])),
        (maker.documents(range(5), 64)[0], encoder.encode(pairs.documents[:5]).document_vectors_NV),
    ):
        np.testing.assert_allclose(F.normalize(model(rows), dim=1).numpy(), served, atol=1e-5)


def test_tokens_of_an_instruction_are_read_and_not_pooled(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    rows = [row._replace(instruction=INSTRUCTION) for row in make_pairs(3).rows()]
    checkpoint = read_checkpoint(tiny_model_folder)
    made = SequenceMaker(
        checkpoint, TrainingPairs.of(rows, {}), pooling="mean", max_query_tokens=16, max_document_tokens=64
    )
    packed, _ = made.queries(range(3), 64)
    model = LandmarkEncoder(checkpoint).requires_grad_(False)
    embeddings_BD, states_ND = model.read(packed)
    starts = np.cumsum(packed.lengths_B) - packed.lengths_B
    for row, start in enumerate(starts.tolist()):
        # Behind [CLS] and prefix: the own tokens and the landmark, as mean pooling has it.
        behind = start + 1 + int(packed.num_prefix_B[row])
        expected = states_ND[behind : start + int(packed.lengths_B[row])].mean(0)
        assert torch.allclose(embeddings_BD[row], expected, atol=1e-6)


INTERVAL, WINDOW, PREFIX = 8, 40, "the old: "


def maker_of(folder: Path, pairs: TrainingPairs, **settings: Any) -> SequenceMaker:
    chosen = {"pooling": "lmk", "attention": "full", "window_tokens": WINDOW, "document_prefix": PREFIX}
    sizes = {"max_query_tokens": 16, "max_document_tokens": 1_000}
    return SequenceMaker(read_checkpoint(folder), pairs, **{**chosen, **sizes, **settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["lmk", "mean"])
def test_vectors_of_rows_are_those_that_an_ingest_gives(
    family: str,
    pooling: str,
    tiny_model_folder: Path,
    make_pairs: Callable[..., TrainingPairs],
    tmp_path: Path,
):
    checkpoint, pairs = tiny_new(family, tiny_model_folder), make_pairs(6)
    save_encoder_folder(tmp_path / "model", checkpoint, EncoderConfig())
    made = maker_of(tiny_model_folder, pairs, pooling=pooling)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), INTERVAL)
        found = embed_texts(LandmarkEncoder(checkpoint), rows, text_M, 100, landmarks=False).numpy()
    config = EncoderConfig(
        model=str(tmp_path / "model"),
        attention="full",
        pooling=pooling,
        landmark_interval=INTERVAL,
        window_tokens=WINDOW,
        window_overlap_tokens=0,
        document_prefix=PREFIX,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert len(rows) > 6, "a document is longer than the window"
    assert np.abs(found - expected).max() <= 1e-5


def test_chunks_apart_are_the_rows_of_chunk_attention(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    pairs = make_pairs(6)
    full, full_text_M = maker_of(tiny_model_folder, pairs).documents(range(6), INTERVAL)
    chunks, text_B = maker_of(tiny_model_folder, pairs, attention="chunk").documents(range(6), INTERVAL)
    assert full_text_M.tolist() == text_B.tolist()
    assert len(full) < len(chunks)
    for name in ("ids_N", "lengths_B", "pooled_start_B", "pooled_end_B"):
        assert np.array_equal(getattr(full.alone, name), getattr(chunks.alone, name)), name


def test_micro_batches_of_rows_of_several_chunks_give_their_vectors_in_order(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    pairs = make_pairs(24)
    units = make_units(pairs, range(24), 3)
    batch = maker_of(tiny_model_folder, pairs).make(
        units, np.full(len(units), INTERVAL), np.ones(len(units), np.bool_)
    )
    parts = split_rows(batch.rows, 60)
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    with torch.no_grad():
        whole, apart = model(batch.rows), torch.cat([model(part) for part in parts])
    assert len(parts) > 2
    assert len(whole) == len(batch.text_B) > len(batch.rows)
    torch.testing.assert_close(apart, whole, atol=1e-5, rtol=1e-5)


def test_train_full_attention_learns_and_the_folder_is_served_so(run: Any, tmp_path: Path):
    run(steps=30, attention="full")
    records = read_log(tmp_path / "run" / "log.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    served = encoder_config({"model": str(tmp_path / "run" / "model")})
    assert (served.attention, served.pooling, served.use_context) == ("full", "lmk", False)


@pytest.mark.parametrize("attention", ["chunk", "landmark", "full"])
def test_held_out_pairs_are_scored_as_the_model_is_served(
    run: Any, monkeypatch: pytest.MonkeyPatch, attention: str
):
    seen: list[bool] = []

    def score(*positional: Any, landmarks: bool, **named: Any) -> dict[str, float]:
        seen.append(landmarks)
        return score_heldout(*positional, landmarks=landmarks, **named)

    monkeypatch.setattr(contrastive, "score_heldout", score)
    run(steps=2, attention=attention)
    assert set(seen) == {attention == "landmark"}


CLS_TRAINING_PREFIX = "the old: "


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["chunk", "landmark"])
@pytest.mark.parametrize("prefix", ["", CLS_TRAINING_PREFIX])
def test_vectors_of_cls_rows_are_those_that_an_ingest_gives(
    family: str,
    attention: str,
    prefix: str,
    tiny_model_folder: Path,
    make_pairs: Callable[..., TrainingPairs],
    tmp_path: Path,
):
    checkpoint, pairs = tiny_new(family, tiny_model_folder), make_pairs(6)
    save_encoder_folder(tmp_path / "model", checkpoint, EncoderConfig())
    made = SequenceMaker(
        checkpoint,
        pairs,
        pooling="cls",
        attention=attention,
        max_query_tokens=16,
        max_document_tokens=1_000,
        document_prefix=prefix,
    )
    model = LandmarkEncoder(checkpoint, initial_gate=INITIAL_GATE)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), 8)
        found = embed_texts(model, rows, text_M, 100, landmarks=attention == "landmark").numpy()
    config = EncoderConfig(
        model=str(tmp_path / "model"),
        attention=attention,
        pooling="cls",
        landmark_interval=8,
        document_prefix=prefix,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert len(rows) > 6
    assert np.abs(found - expected).max() <= 1e-5
    assert rows.alone.pooled_start_B.tolist() == [(1 + made.prefix_tokens) if prefix else 0] * len(rows)


def test_train_cls_learns_and_the_folder_is_served_so(run: Any, tmp_path: Path):
    run(steps=30, pooling="cls", attention="chunk", landmark_intervals=(40,))
    losses = [r["loss"] for r in read_log(tmp_path / "run" / "log.jsonl") if "loss" in r]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    served = encoder_config({"model": str(tmp_path / "run" / "model")})
    assert (served.attention, served.pooling, served.landmark_interval) == ("chunk", "cls", 40)
    assert np.isfinite(DocumentEncoder(served).encode(["cat mat"]).document_vectors_NV).all()
    with pytest.raises(ConfigError, match="pooling cls must go with attention chunk or landmark, got full"):
        encoder_config({"model": str(tmp_path / "run" / "model"), "attention": "full"})


def test_train_refuses_cls_where_rows_hold_several_chunks():
    with pytest.raises(ConfigError, match="pooling cls must go with attention chunk or landmark, got full"):
        TrainConfig(steps=1, pooling="cls", attention="full")


def test_train_refuses_cls_for_a_base_without(decoder: Path, pairs_file: Path, tmp_path: Path):
    config = TrainConfig(**{**LOOP_SETTINGS, "pooling": "cls"})
    with pytest.raises(ConfigError, match=r"pooling cls must go with a base model that has \[CLS\] or BOS"):
        train([pairs_file], tmp_path / "run", config, base=str(decoder))


@pytest.mark.parametrize(
    ("intervals", "longest", "expected"),
    [((32, 64, 128, 256), 510, 64), ((16, 32), 510, 32), ((128, 256), 510, 128), ((512,), 510, 510)],
)
def test_served_interval_is_that_of_an_ingest_or_the_nearest_trained(
    intervals: tuple[int, ...], longest: int, expected: int
):
    assert served_interval(intervals, longest) == expected


ROWS_WITHOUT_CLS_PREFIX = "the old: "


def maker_without_cls(checkpoint: Checkpoint, pairs: TrainingPairs, **settings: object) -> SequenceMaker:
    sizes = {"max_query_tokens": 16, "max_document_tokens": 1_000, "window_tokens": 96}
    return SequenceMaker(checkpoint, pairs, **{**sizes, "pooling": "lmk", **settings})


@pytest.mark.parametrize("attention", ["chunk", "landmark", "full"])
@pytest.mark.parametrize("pooling", ["mean", "lmk"])
@pytest.mark.parametrize("prefix", ["", ROWS_WITHOUT_CLS_PREFIX])
def test_vectors_of_rows_without_cls_are_those_that_an_ingest_gives(
    decoder: Path, make_pairs: Callable[..., TrainingPairs], attention: str, pooling: str, prefix: str
):
    checkpoint, pairs = read_checkpoint(decoder), make_pairs(6)
    assert checkpoint.cls_id is None
    made = maker_without_cls(checkpoint, pairs, pooling=pooling, attention=attention, document_prefix=prefix)
    model = LandmarkEncoder(checkpoint, initial_gate=INITIAL_GATE)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), 8)
        found = embed_texts(model, rows, text_M, 100, landmarks=attention == "landmark").numpy()
    config = EncoderConfig(
        model=str(decoder),
        attention=attention,
        pooling=pooling,
        landmark_interval=8,
        window_tokens=96 if attention == "full" else 0,
        window_overlap_tokens=0,
        document_prefix=prefix,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert np.abs(found - expected).max() <= 1e-5
    if attention != "full":
        assert (rows.own_lengths == rows.lengths_B - 1 - made.prefix_tokens).all()


def test_context_documents_are_read_as_by_an_ingest(decoder: Path, make_pairs: Callable[..., TrainingPairs]):
    checkpoint, pairs = read_checkpoint(decoder), make_pairs(6)
    with torch.no_grad():
        found = LandmarkEncoder(checkpoint).embed_documents(
            maker_without_cls(checkpoint, pairs).context(range(6), 12)
        )
    config = EncoderConfig(model=str(decoder), precision="fp32")
    first_stage = ContextEncoder.of(load_backbone(config), config, ContextConfig(max_document_tokens=12))
    assert np.abs(found.numpy() - first_stage.embed(pairs.documents)).max() <= 1e-5


def test_decoder_is_trained_and_served(decoder: Path, pairs_file: Path, tmp_path: Path):
    config = TrainConfig(**{**LOOP_SETTINGS, "steps": 3})
    report = train([pairs_file], tmp_path / "run", config, base=str(decoder))
    assert report.last_loss is not None
    served = DocumentEncoder(EncoderConfig(model=str(tmp_path / "run" / "model"), precision="fp32"))
    assert np.isfinite(served.encode(["cat mat"]).document_vectors_NV).all()


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
