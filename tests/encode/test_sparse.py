"""Learned sparse encoders: weights as transformers computes them, layouts, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.encode import sparse
from cairn.pipeline.encode.sparse import SparseEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.types import SPARSE_STEP, SPARSE_WEIGHT
from safetensors.torch import load_file, save_file

from tests.sparse_models import make_sparse_model, reference_weights

TEXTS = ["the old stone path", "a river walks over the mountain, the cat sat on the mat.", "x"]


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_weights_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    folder = make_sparse_model(tmp_path / "model", model_type=model_type)

    found = SparseEncoder(str(folder), "fp32").weigh(TEXTS)

    for own, expected in zip(found, reference_weights(folder, TEXTS), strict=True):
        assert own == pytest.approx(expected, abs=1e-4)
        assert len(own) > 10


@pytest.mark.parametrize(("activation", "twice"), [("relu", False), ("log1p_relu", True)])
def test_modules_say_how_often_the_logarithm_is_taken(
    tmp_path: Path, activation: str, *, twice: bool
) -> None:
    folder = make_sparse_model(tmp_path / "model", "modules", activation=activation)

    encoder = SparseEncoder(str(folder), "fp32")

    expected = reference_weights(folder, TEXTS, twice=twice)
    assert encoder.weigh(TEXTS)[1] == pytest.approx(expected[1], abs=1e-4)
    assert encoder.encode_queries(TEXTS)[1] == pytest.approx(expected[1], abs=1e-4)


def test_router_weighs_queries_by_its_table_each_token_once(tmp_path: Path) -> None:
    encoder = SparseEncoder(str(make_sparse_model(tmp_path / "model", "router")), "fp32")

    (found,) = encoder.encode_queries(["the cat the cat"])

    tokenizer = encoder._tokenizer
    assert found == pytest.approx(
        {token: 1 + token / 10 for token in map(tokenizer.token_to_id, ("the", "cat"))}
    )


def test_text_longer_than_a_row_has_the_highest_weight_of_its_rows(tmp_path: Path) -> None:
    folder = make_sparse_model(tmp_path / "model")
    words = ["stone", "path", "cat", "river"] * 30

    found = SparseEncoder(str(folder), "fp32").weigh([" ".join(words)])[0]

    rows = reference_weights(folder, [" ".join(words[:95]), " ".join(words[95:])])
    tokens = rows[0].keys() | rows[1].keys()
    expected = {token: max(row.get(token, 0.0) for row in rows) for token in tokens}
    assert found == pytest.approx(expected, abs=1e-4)


def test_stored_weights_are_the_strongest_in_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "MAX_TOKENS", 8)
    folder = make_sparse_model(tmp_path / "model")

    stored = SparseEncoder(str(folder), "fp32").encode(TEXTS)

    rows = np.ascontiguousarray(stored.rows).view(SPARSE_WEIGHT)[:, 0]
    for place, expected in enumerate(reference_weights(folder, TEXTS)):
        own = rows[stored.offsets[place] : stored.offsets[place + 1]]
        strongest = sorted(expected, key=lambda token: -expected[token])[:8]
        assert sorted(own["token"].tolist()) == sorted(strongest)
        assert np.allclose(
            own["weight"] * SPARSE_STEP,
            [expected[token] for token in own["token"].tolist()],
            atol=SPARSE_STEP,
        )


Change = Callable[[dict[str, torch.Tensor]], object]


def _changed(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _with_another_vocabulary(folder: Path) -> None:
    path = folder / "query_0_SparseStaticEmbedding" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["new"] = len(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))


def _with_a_short_table(folder: Path) -> None:
    save_file({"weight": torch.ones(5)}, folder / "query_0_SparseStaticEmbedding" / "model.safetensors")


BIAS = "cls.predictions.bias"
HEADLESS: Change = lambda tensors: tensors.pop("cls.predictions.transform.dense.weight")  # noqa: E731
NAN: Change = lambda tensors: tensors[BIAS][3:4].fill_(float("nan"))  # noqa: E731
SMALL: Change = lambda tensors: tensors.update({BIAS: tensors[BIAS][:40].clone()})  # noqa: E731


@pytest.mark.parametrize(
    ("layout", "damage", "sentence"),
    [
        (
            "plain",
            partial(_changed, change=HEADLESS),
            "must have a head for masked tokens, got no cls.predictions.transform.dense",
        ),
        ("plain", partial(_changed, change=NAN), "logits of a sparse encoder must be finite, got NaN"),
        ("plain", partial(_changed, change=SMALL), "must have a weight for each of its"),
        ("router", _with_another_vocabulary, "must have one vocabulary, got two"),
        ("router", _with_a_short_table, "finite numbers, got others"),
    ],
)
def test_model_that_cannot_weigh_is_refused(tmp_path: Path, layout: Any, damage: Any, sentence: str) -> None:
    folder = make_sparse_model(tmp_path / "model", layout)
    damage(folder)

    with pytest.raises(ModelError, match=re.escape(sentence)):
        SparseEncoder(str(folder), "fp32").encode(["a cat"])


def test_other_modules_are_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    with pytest.raises(ModelError, match="must have a head for masked tokens"):
        SparseEncoder(str(tiny_model_folder))
    with pytest.raises(ModelError, match="must take the max of relu or log1p_relu, got 'sum'"):
        SparseEncoder(str(make_sparse_model(tmp_path / "sum", "modules", pooling="sum")))
    (tmp_path / "dense").mkdir()
    modules = [{"type": "sentence_transformers.models.Pooling", "path": ""}]
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="must be a transformer for masked tokens and SpladePooling"):
        SparseEncoder(str(tmp_path / "dense"))
