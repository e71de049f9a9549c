from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import (
    ConfigError,
    ModelError,
    SourceError,
)
from cairn.pipeline.lab.train import contrastive
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.heldout import score_heldout
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import LOOP_SETTINGS


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


def test_train_saved_models_are_read_by_the_engine(run: Any, tmp_path: Path):
    report = run(steps=2)
    for name in ("model", "best"):
        assert (
            load_backbone(EncoderConfig(model=str(tmp_path / "run" / name), precision="fp32")).model_dim == 32
        )
    assert (report.pairs, report.heldout_pairs, report.steps, report.resumed_at) == (60, 6, 2, 0)


def test_train_hard_negatives_and_the_encoder_as_surrogate_change_what_is_learned(run: Any, tmp_path: Path):
    run("plain", steps=2)
    run("hard", steps=2, hard_negatives=2, surrogate="encoder")
    record = read_log(tmp_path / "hard" / "log.jsonl")[1]
    assert record["num_documents"] > record["num_queries"]


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


def test_train_one_source_only_is_trained_on(run: Any, pairs_file: Path):
    records = [json.loads(line) | {"source": "only"} for line in pairs_file.read_text().splitlines()]
    pairs_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(steps=2).steps == 2


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


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"batch_pairs": 1},
        {"context_absence": 1.5},
        {"temperature": 0.0},
        {"margin": float("nan")},
        {"seed": -1},
    ],
)
def test_train_config_values_out_of_range_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TrainConfig(**{"steps": 1, **settings})


def test_train_damaged_surrogate_file_is_said_in_a_sentence(run: Any, tmp_path: Path):
    run(steps=1)
    path = tmp_path / "run" / "surrogate.safetensors"
    path.write_bytes(b"\x07" * 20)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        Exception, match=r"surrogate\.safetensors of the run must be a whole safetensors file"
    ):
        run(steps=1)


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
