from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model import landmark_mixer
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmark_mixer import LandmarkMixer, mixer_of
from safetensors.torch import save_file

WIDTH = 16


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture
def generator():
    return np.random.default_rng(0)


@pytest.fixture
def mixer():
    torch.manual_seed(0)
    mixer = LandmarkMixer(WIDTH, num_heads=2, head_dim=8)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return mixer.eval()


def _corpus(generator, counts=(1, 3, 7, 2, 30)):
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    x = generator.normal(size=(offsets[-1], WIDTH)).astype(np.float32)
    titles = generator.normal(size=(len(counts), WIDTH)).astype(np.float32)
    titles[1] = 0.0
    return x, offsets, titles, generator.normal(size=(5, WIDTH)).astype(np.float32)


def _reference(mixer, x, title, context):
    """One document, landmark by landmark, head by head, as the module's equation reads."""
    weights = {name: value.detach().numpy().astype(np.float64) for name, value in mixer.state_dict().items()}
    x, context = _unit(x.astype(np.float64)), None if context is None else _unit(context.astype(np.float64))
    mean = _unit(x.sum(0))
    title = _unit(title.astype(np.float64)) if title is not None and np.any(title) else np.zeros(WIDTH)

    def attend(part, head, query, keys, penalty):
        width = len(weights[f"{part}.query.bias"]) // 2
        own = slice(head * width, (head + 1) * width)
        q = weights[f"{part}.query.weight"][own] @ query + weights[f"{part}.query.bias"][own]
        k = keys @ weights[f"{part}.key.weight"][own].T + weights[f"{part}.key.bias"][own]
        logits = k @ q - penalty
        chosen = np.exp(logits - logits.max())
        return chosen / chosen.sum() @ keys

    rows = []
    for i, own in enumerate(x):
        features = np.array([own @ mean - 0.5, own @ title - 0.3, np.log(len(x)) / 5, np.linalg.norm(title)])
        y = own + (weights["title_gate"] + features @ weights["title_slope"]) * title
        if len(x) > 1:
            y = y + (weights["mean_gate"] + features @ weights["mean_slope"]) * mean
        for head in range(2):
            others = [j for j in range(len(x)) if j != i]
            if others:
                penalty = np.exp(weights["distance"][head]) * np.log1p(np.abs(np.array(others) - i))
                gate = weights["document.gate"][head] + features @ weights["document.gate_slope"][head]
                y = y + gate * attend("document", head, own, x[others], penalty)
            if context is not None:
                gate = weights["context.gate"][head] + features @ weights["context.gate_slope"][head]
                y = y + gate * attend("context", head, own, context, 0.0)
        rows.append(_unit(y @ weights["turn"]))
    return np.array(rows)


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("with_titles", [False, True])
def test_landmarks_of_any_document_are_mixed_as_the_equation_says(
    mixer, generator, with_titles, with_context
):
    x, offsets, titles, context = _corpus(generator)
    mixed = mixer.mix_documents(
        x, offsets, titles if with_titles else None, context if with_context else None
    )
    for document, (first, end) in enumerate(itertools.pairwise(offsets)):
        title = titles[document] if with_titles else None
        expected = _reference(mixer, x[first:end], title, context if with_context else None)
        np.testing.assert_allclose(mixed[first:end], expected, atol=2e-5)


def test_a_new_mixer_leaves_the_base_vectors_as_they_are(generator):
    x, offsets, titles, context = _corpus(generator)
    np.testing.assert_allclose(
        LandmarkMixer(WIDTH).mix_documents(x, offsets, titles, context), _unit(x), atol=1e-6
    )
    np.testing.assert_allclose(LandmarkMixer(WIDTH).mix_queries(x, context), _unit(x), atol=1e-6)


def test_queries_are_moved_by_the_context_alone_as_documents_of_one_landmark(mixer, generator):
    x, _, _, context = _corpus(generator)
    turn = mixer.turn.detach().numpy()
    np.testing.assert_allclose(mixer.mix_queries(x, None), _unit(_unit(x) @ turn), atol=1e-5)
    assert np.abs(mixer.mix_queries(x, context) - mixer.mix_queries(x, None)).max() > 1e-2
    mixer.query_context = mixer.context
    with torch.no_grad():
        mixer.title_gate.zero_()
    documents = mixer.mix_documents(x, np.arange(len(x) + 1), None, context)
    np.testing.assert_allclose(mixer.mix_queries(x, context), documents, atol=1e-5)


def test_a_long_document_is_mixed_in_equal_stretches(mixer, generator, monkeypatch):
    monkeypatch.setattr(landmark_mixer, "STRETCH_LANDMARKS", 4)
    monkeypatch.setattr(landmark_mixer, "BATCH_LANDMARKS", 8)
    x, offsets, titles, context = _corpus(generator, counts=(10, 2))
    mixed = mixer.mix_documents(x, offsets, titles, context)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=1), 1.0, atol=1e-5)
    moved = x.copy()
    moved[9] = -moved[9]
    # The last landmark is in the last of three stretches: the first feels it through the document's mean
    # alone.
    with torch.no_grad():
        mixer.mean_gate.zero_()
        mixer.mean_slope.zero_()
        for heads in (mixer.document, mixer.context):
            heads.gate_slope.zero_()
        mixer.title_slope.zero_()
    before, after = (mixer.mix_documents(vectors, offsets, titles, context) for vectors in (x, moved))
    np.testing.assert_allclose(before[:6], after[:6], atol=1e-6)
    assert np.abs(before[6:9] - after[6:9]).max() > 1e-4


def _tensors(width):
    torch.manual_seed(1)
    return {
        f"{LANDMARK_MIXER}{name}": value.contiguous()
        for name, value in LandmarkMixer(width, num_heads=2, head_dim=8).state_dict().items()
    }


def _load(folder):
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32"))


def test_a_mixer_beside_the_weights_is_read_and_fingerprinted_and_a_damaged_one_refused(
    tiny_model_folder, tmp_path
):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    plain = _load(folder)
    save_file(_tensors(plain.embedding_dim), folder / EXTRA_NAME)
    backbone = _load(folder)
    mixer = mixer_of(backbone)
    assert mixer is not None
    assert mixer.width == backbone.embedding_dim
    assert backbone.weights_fingerprint != plain.weights_fingerprint
    turn, gate = f"{LANDMARK_MIXER}turn", f"{LANDMARK_MIXER}document.gate"
    for name, value, message in (
        (turn, None, "tensors of a mixer"),
        (gate, None, "gates and query weights"),
        (turn, torch.full((32, 32), torch.nan), "finite"),
        (turn, torch.eye(3), "tensors of a mixer"),
    ):
        tensors = _tensors(plain.embedding_dim) | {name: value}
        save_file({name: each for name, each in tensors.items() if each is not None}, folder / EXTRA_NAME)
        with pytest.raises(ModelError, match=message):
            mixer_of(_load(folder))
