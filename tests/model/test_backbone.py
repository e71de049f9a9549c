from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.model_types import MODEL_TYPES

TEXTS = ["the cat sat on the mat.", "old stone path " * 30, "a", "walking mountains, rivers; " * 12 + "end"]
FAMILIES = ["tiny_model_folder", "modernbert_folder", "nomic_bert_folder"]


def _config(folder, **settings):
    return EncoderConfig(
        model=str(folder),
        precision="fp32",
        landmark_interval=12,
        window_tokens=60,
        window_overlap_tokens=15,
        batch_tokens=150,
        **settings,
    )


def _context():
    return ContextSet(
        doc_ids=tuple(f"c{index}" for index in range(5)),
        content_sha256s=("0" * 64,) * 5,
        cluster_ids_C=np.zeros(5, np.int32),
        embeddings_CD=np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32),
        first_stage_fingerprint="first",
    )


def test_load_unknown_family_names_the_known_ones(tiny_model_folder, tmp_path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    known = ", ".join(MODEL_TYPES)
    with pytest.raises(
        ModelError, match=rf"^model_type must be one of {known}, got 't5'; choose a model of these families$"
    ):
        load_backbone(EncoderConfig(model=str(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_load_every_family_fulfils_the_protocol(request, family):
    assert isinstance(load_backbone(_config(request.getfixturevalue(family))), Backbone)


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize(
    "changes", [{"pooling": "lmk"}, {"attention": "full"}, {"use_context": True}, {"temperature": 0.5}]
)
def test_encode_rotary_families_settings_move_vectors(request, family, changes):
    folder = request.getfixturevalue(family)
    plain = DocumentEncoder(_config(folder)).encode(TEXTS).chunk_vectors_MV
    other = (
        DocumentEncoder(_config(folder, **changes), _context() if "use_context" in changes else None)
        .encode(TEXTS)
        .chunk_vectors_MV
    )
    assert float(np.abs(plain - other).max()) > 1e-2
