"""Documents through a model that has a landmark mixer, as the default has: titles, context, truncation."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from cairn.pipeline.config import DEFAULT_MODEL, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import CAIRN_SETTINGS_NAME, encoder_config
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from safetensors.torch import save_file

TEXTS = ["the cat sat on the mat and looked at the dog " * 12, "a dog", "words of another document " * 9]
TITLES = ["cats", None, "other words"]


@pytest.fixture
def trained_folder(tiny_model_folder, tmp_path):
    """A folder of a mixer alone, on the tiny model as its base."""
    folder = tmp_path / "trained"
    folder.mkdir()
    base = read_checkpoint(tiny_model_folder)
    torch.manual_seed(0)
    mixer = LandmarkMixer(base.integer("hidden_size"), num_heads=2, head_dim=8)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "gate" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    save_file(
        {f"{LANDMARK_MIXER}{name}": value.contiguous() for name, value in mixer.state_dict().items()},
        folder / EXTRA_NAME,
    )
    settings = {
        "format": 1,
        "base": {"model": str(tiny_model_folder), "weights_sha256": base.weights_sha256},
        "encoder": {"landmark_interval": 16, "use_context": True},
    }
    (folder / CAIRN_SETTINGS_NAME).write_text(json.dumps(settings))
    return folder


def _encoder(folder, context=None, **settings):
    config = {"model": str(folder), "landmark_interval": 16, "precision": "fp32", **settings}
    return DocumentEncoder(EncoderConfig(**config, use_context=context is not None), context)


def test_a_title_moves_its_own_document_alone_where_a_mixer_reads_it(trained_folder, tiny_model_folder):
    for folder, expected in ((trained_folder, [True, False, True]), (tiny_model_folder, [False] * 3)):
        encoder = _encoder(folder)
        assert encoder.reads_titles is any(expected)
        without, with_titles = encoder.encode(TEXTS), encoder.encode(TEXTS, titles=TITLES)
        moved = np.abs(without.document_vectors_NV - with_titles.document_vectors_NV).max(axis=1)
        assert (moved > 1e-3).tolist() == expected
        assert (moved < 1e-6).tolist() == [not is_moved for is_moved in expected]
        np.testing.assert_array_equal(without.start_char, with_titles.start_char)


def test_a_landmark_sees_the_rest_of_its_document(trained_folder, tiny_model_folder):
    ending = " and then words of another document"
    for folder, expected in ((trained_folder, True), (tiny_model_folder, False)):
        encoder = _encoder(folder)
        first = encoder.encode([TEXTS[0], TEXTS[0] + ending * 8])
        moved = np.abs(first.chunk_vectors_MV[0] - first.chunk_vectors_MV[first.chunk_offsets[1]]).max()
        assert bool(moved > 1e-4) is expected


def test_fewer_dimensions_are_the_first_of_the_mixed_ones(trained_folder):
    whole, short = _encoder(trained_folder), _encoder(trained_folder, dims=8)
    expected = whole.encode(TEXTS, titles=TITLES).chunk_vectors_MV[:, :8]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(short.encode(TEXTS, titles=TITLES).chunk_vectors_MV, expected, atol=1e-5)
    queries = whole.encode_queries(["a dog"])[:, :8]
    np.testing.assert_allclose(short.encode_queries(["a dog"]), queries / np.linalg.norm(queries), atol=1e-5)


def test_a_folder_of_a_mixer_brings_its_settings_and_its_base(trained_folder, tmp_path):
    config = encoder_config({"model": str(trained_folder)})
    assert config.use_context
    assert config.landmark_interval == 16
    encoder = load_encoder(trained_folder, use_context=False, precision="fp32")
    by_itself = load_encoder(trained_folder, precision="fp32")  # reads no context without one
    np.testing.assert_array_equal(by_itself.encode_queries(["a dog"]), encoder.encode_queries(["a dog"]))
    assert "landmark mixer" in encoder.save(tmp_path / "whole")
    again = load_encoder(tmp_path / "whole", use_context=False, precision="fp32")
    np.testing.assert_allclose(
        encoder.encode_documents(TEXTS, TITLES), again.encode_documents(TEXTS, TITLES), atol=1e-6
    )


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ({"weights_sha256": "0" * 64}, "was trained for"),
        ("all-MiniLM-L6-v2", "base in cairn_config"),
        ({"model": "x", "weights_sha256": None}, "base in cairn_config"),
        ({"model": 1}, "base in cairn_config"),
    ],
)
def test_a_base_is_a_model_with_the_weights_that_the_mixer_was_trained_on(trained_folder, base, sentence):
    path = trained_folder / CAIRN_SETTINGS_NAME
    settings = json.loads(path.read_text())
    named = settings["base"] | base if isinstance(base, dict) else base
    path.write_text(json.dumps({**settings, "base": named}))
    with pytest.raises(ModelError, match=sentence):
        read_checkpoint(trained_folder)


def test_a_base_has_no_base(trained_folder, tmp_path):
    second = shutil.copytree(trained_folder, tmp_path / "second")
    path = second / CAIRN_SETTINGS_NAME
    settings = json.loads(path.read_text())
    settings["base"]["model"] = str(trained_folder)
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="whole model"):
        read_checkpoint(second)


def test_titles_are_one_a_text(trained_folder):
    with pytest.raises(ConfigError, match="one a text"):
        load_encoder(trained_folder).encode_documents(TEXTS, ["one"])


def test_the_default_model_is_the_base_with_what_was_trained_for_it():
    config = encoder_config({})
    assert config.model == DEFAULT_MODEL
    assert config.use_context
    base, trained = load_encoder("all-MiniLM-L6-v2"), load_encoder()
    own = base.encode_documents(["a short text"])
    # Without title, context and neighbours a vector is the base's own, turned: its cosines are the same.
    np.testing.assert_allclose(
        own @ base.encode_queries(["text"]).T,
        trained.encode_documents(["a short text"]) @ trained.encode_queries(["text"]).T,
        atol=1e-3,
    )
