"""The cross-encoder against transformers, on a tiny random one, and the models that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import ConfigError, ModelError

TEXTS = ["the stone path", "a river and a mat " * 40, "old mountain", ""]


def test_scores_are_those_of_the_model_itself(tiny_cross_encoder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    scores = CrossEncoderReranker(str(tiny_cross_encoder)).score("the cat", TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_cross_encoder))
    model = AutoModelForSequenceClassification.from_pretrained(str(tiny_cross_encoder)).eval()
    with torch.inference_mode():
        logits = [
            model(
                **tokenizer("the cat", text, truncation=True, max_length=94, return_tensors="pt")
            ).logits.item()
            for text in TEXTS
        ]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)
    assert scores.dtype == np.float64
    assert len(set(scores.tolist())) == len(TEXTS)


def test_search_is_ranked_by_the_model(tiny_cross_encoder: Path, stones_root: Path) -> None:
    stones = open_collection("stones", root=stones_root)
    found = stones.search("granite", top_k=3, passages=2, rerank=str(tiny_cross_encoder))
    model = CrossEncoderReranker(str(tiny_cross_encoder))
    every = stones.search("granite", top_k=30, passages=2)
    best = {
        hit.doc_id: model.score("granite", [passage.text for passage in hit.passages]).max()
        for hit in every.hits
    }
    assert [hit.doc_id for hit in found.hits] == sorted(best, key=lambda doc_id: -best[doc_id])[:3]
    for hit in found.hits:
        assert hit.score == pytest.approx(best[hit.doc_id], abs=1e-6)
        assert hit.scores["rerank"] == hit.score
    assert "rerank" not in stones.search("granite").hits[0].scores


def test_command_line_ranks_by_the_model(
    tiny_cross_encoder: Path, stones_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["search", "granite", "--json", "--top-k", "3"]
    arguments += ["--collection", "stones", "--root", str(stones_root)]
    assert run(cairn, [*arguments, "--rerank", str(tiny_cross_encoder)], "cairn") == 0
    said = capfd.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    expected = open_collection("stones", root=stones_root).search(
        "granite", top_k=3, rerank=str(tiny_cross_encoder)
    )
    assert [hit["doc_id"] for hit in found["hits"]] == [hit.doc_id for hit in expected.hits]
    capfd.readouterr()
    assert run(cairn, [*arguments, "--rerank", "no/such-model"], "cairn") == 2
    assert capfd.readouterr().err.startswith("error: ")


@pytest.fixture
def changed(tiny_cross_encoder: Path, tmp_path: Path) -> Path:
    """Return a copy of the cross-encoder."""
    return Path(shutil.copytree(tiny_cross_encoder, tmp_path / "model"))


def test_model_without_one_score_is_refused_instead_of_given_a_random_head(changed: Path) -> None:
    with pytest.raises(ConfigError, match="cairn models get cross-encoder/none"):
        CrossEncoderReranker("cross-encoder/none")
    config = json.loads((changed / "config.json").read_text())
    for misfit, found in (
        ({"architectures": ["BertModel"]}, "no head for one"),
        ({"id2label": {"0": "A", "1": "B", "2": "C"}}, "3 scores"),
        ({"id2label": {}}, "2 scores"),
    ):
        (changed / "config.json").write_text(json.dumps({**config, **misfit}))
        with pytest.raises(ConfigError, match=f"which has {found}"):
            CrossEncoderReranker(str(changed))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None], ids=["empty", "damaged", "pickled"])
def test_weights_that_are_no_safetensors_are_one_sentence(changed: Path, damage: bytes | None) -> None:
    weights = changed / "model.safetensors"
    if damage is None:
        weights.rename(changed / "pytorch_model.bin")
    else:
        weights.write_bytes(damage)
    with pytest.raises(ModelError, match="must load as a cross-encoder in safetensors") as caught:
        CrossEncoderReranker(str(changed))
    assert "\n" not in str(caught.value)


def test_failing_model_does_not_repeat_the_text(
    tiny_cross_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CrossEncoderReranker(str(tiny_cross_encoder))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret text")

    monkeypatch.setattr(model._model, "predict", fail)
    with pytest.raises(ModelError, match=r"got RuntimeError$"):
        model.score("q", ["secret text"])
