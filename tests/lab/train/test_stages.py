"""Two stages (NV-Embed §3.3), prefixes and instructions: from files to a served model."""

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
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.lab.train.conftest import LOOP_SETTINGS, TOPICS

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
