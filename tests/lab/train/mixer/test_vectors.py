from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train import mixer_data as mixer_vectors
from cairn.pipeline.lab.train.mixer_data import BaseVectors, unit
from cairn.pipeline.model.context_encoder import ContextEncoder

TEXTS = ["the old stone", "a river " * 30, "the cat sat on the mat", "a mountain path"]


@pytest.fixture
def settings(tiny_model_folder: Path) -> EncoderConfig:
    return EncoderConfig(model=str(tiny_model_folder), precision="fp32", landmark_interval=16)


class Heard:
    """Listens for texts that are embedded."""

    def __init__(self) -> None:
        self.embedded: list[int] = []
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        self.embedded.append(total or 0)
        self.stages.append(stage)


def test_base_vectors_of_documents_are_an_encoders_and_their_means_its_documents(
    settings: EncoderConfig, tmp_path: Path
):
    found = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    encoded = DocumentEncoder(settings).encode(TEXTS)
    assert found.offsets_N1.tolist() == encoded.chunk_offsets.tolist()
    assert found.offsets_N1[2] - found.offsets_N1[1] > 2
    np.testing.assert_allclose(found.vectors_MD, encoded.chunk_vectors_MV, atol=1e-3)
    np.testing.assert_allclose(found.means(), encoded.document_vectors_NV, atol=1e-3)


def test_base_vectors_of_queries_and_titles_stand_behind_their_own_prefixes(settings: EncoderConfig):
    prefixed = replace(settings, document_prefix="path", query_prefix="walk")
    vectors, heard = BaseVectors(prefixed, None), Heard()
    np.testing.assert_allclose(
        vectors.embed("query", TEXTS, heard).means(),
        DocumentEncoder(prefixed).encode_queries(TEXTS),
        atol=1e-3,
    )
    plain = DocumentEncoder(settings).encode(TEXTS).document_vectors_NV
    np.testing.assert_allclose(vectors.embed("title", TEXTS, heard).means(), plain, atol=1e-3)
    assert heard.stages == ["queries", "titles"]


def test_base_vectors_of_context_documents_are_a_first_stage_s(settings: EncoderConfig, tmp_path: Path):
    for tokens in (12, 48):
        context = ContextConfig(max_document_tokens=tokens)
        vectors, heard = BaseVectors(settings, tmp_path, context), Heard()
        first_stage = ContextEncoder.of(vectors.encoder.backbone, settings, context)
        found = vectors.embed("context", TEXTS, heard)
        np.testing.assert_allclose(found.means(), unit(first_stage.embed(TEXTS)), atol=1e-3)
        assert (heard.stages, heard.embedded) == (["context documents"], [4])
    shorter = BaseVectors(settings, tmp_path, ContextConfig(max_document_tokens=12)).embed("context", TEXTS)
    assert np.abs(shorter.means()[1] - found.means()[1]).max() > 0.01


def test_base_vectors_embeds_only_what_is_not_kept_and_gives_the_order_asked_for(
    settings: EncoderConfig, tmp_path: Path
):
    first, second = Heard(), Heard()
    before = BaseVectors(settings, tmp_path).embed("document", TEXTS[:3], first)
    after = BaseVectors(settings, tmp_path).embed("document", [TEXTS[3], TEXTS[2], TEXTS[0]], second)
    assert (first.embedded, second.embedded) == ([3], [1])
    np.testing.assert_array_equal(after.means()[1:], before.means()[[2, 0]])


def test_base_vectors_of_a_killed_run_are_kept_block_by_block(
    settings: EncoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mixer_vectors, "BLOCK_TEXTS", 2)

    def kill(stage: str, done: int, total: int | None, unit: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BaseVectors(settings, tmp_path).embed("document", TEXTS, kill)
    heard = Heard()
    found = BaseVectors(settings, tmp_path).embed("document", TEXTS, heard)
    assert heard.embedded == [2]
    np.testing.assert_array_equal(
        found.vectors_MD, BaseVectors(settings, None).embed("document", TEXTS).vectors_MD
    )


@pytest.mark.parametrize(
    "changed", [{"landmark_interval": 24}, {"query_prefix": "walk"}, {"precision": "auto"}]
)
def test_base_vectors_of_other_settings_are_others(
    settings: EncoderConfig, tmp_path: Path, changed: dict[str, Any]
):
    BaseVectors(settings, tmp_path).embed("query", TEXTS)
    heard = Heard()
    BaseVectors(replace(settings, **changed), tmp_path).embed("query", TEXTS, heard)
    assert heard.embedded == [4]


def test_base_vectors_in_a_damaged_file_are_embedded_again(
    settings: EncoderConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    before = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING):
        after = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    assert "is damaged; its texts are embedded again" in caplog.text
    np.testing.assert_array_equal(after.vectors_MD, before.vectors_MD)


def test_base_vectors_whose_counts_do_not_fit_are_embedded_again(settings: EncoderConfig, tmp_path: Path):
    vectors = BaseVectors(settings, tmp_path)
    vectors.keep("document", TEXTS, np.array([1, 1, 1, 5]), np.zeros((4, 32), np.float16))
    heard = Heard()
    assert vectors.embed("document", TEXTS, heard).means().any()
    assert heard.embedded == [4]


def test_base_vectors_of_no_texts_are_none(settings: EncoderConfig):
    found = BaseVectors(settings, None).embed("title", [])
    assert found.vectors_MD.shape == (0, 32)
    assert found.means().shape == (0, 32)


def test_unit_leaves_zeros_as_they_are():
    np.testing.assert_allclose(
        unit(np.array([[3.0, 4.0], [0.0, 0.0]], np.float16)), [[0.6, 0.8], [0.0, 0.0]], atol=1e-3
    )
