from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.lab.train.families import FAMILIES, SIZES


@pytest.mark.parametrize("attention", ["chunk", "landmark"])
def test_three_stages_of_an_m3bert_end_in_a_folder_served_at_fewer_layers_and_dimensions(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path, attention: Any
):
    sizes = tmp_path / "m3bert.json"
    sizes.write_text(json.dumps({"model_type": "m3bert", **SIZES, **FAMILIES["m3bert"]}))
    exits: dict[str, Any] = {"matryoshka_layers": (1, 2), "matryoshka_dims": (8, 32)}
    run("first", steps=2, from_config=sizes, **exits)
    run("second", steps=2, base=str(tmp_path / "first" / "best"), language_smoothing=0.7, **exits)
    settings = TrainConfig(
        steps=3, batch_pairs=12, max_document_tokens=48, attention=attention, context_documents=0,
        distillation_weight=0.0, schedule="cosine", heldout_pairs=6, precision="fp32", **exits,
    )  # fmt: skip
    report = train([pairs_file], tmp_path / "third", settings, base=str(tmp_path / "second" / "model"))
    assert report.steps == 3
    folder = str(tmp_path / "third" / "model")
    vectors: list[np.ndarray] = []
    for cut in ({}, {"dims": 8}, {"layers": 1, "dims": 8}):
        config = encoder_config({"model": folder, "precision": "fp32", **cut})
        encoder = DocumentEncoder(config, None, load_backbone(config))
        vectors.append(encoder.encode_queries(["the old stone path"])[0])
    whole, narrow, shallow = vectors
    assert (len(whole), len(narrow), len(shallow)) == (32, 8, 8)
    assert narrow == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)
    assert np.abs(narrow - shallow).max() > 1e-3
