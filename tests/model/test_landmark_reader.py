"""Landmark attention in whole models, against a naive reference.

The reference is one sequence of all context vectors and tokens, with a dense attention bias in each layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import embed_chunks, pad_rows
from cairn.pipeline.model.engine.pattern import Pattern
from cairn.pipeline.model.folders.own_tensors import CONTEXT_GATES, GATE_NAMES, LANDMARK_GATES
from cairn.pipeline.model.landmark_reader import LandmarkReader
from cairn.pipeline.model.landmarks import Chunks, lay_out

CLOSED = float("-inf")
QUERIES_AT_ONCE = 256
"""So many rows of 8,192 logits stay in the processor's cache."""
LENGTHS, WINDOWS = [12, 12, 9, 12, 4, 12, 12, 12, 3], [0, 0, 0, 1, 2, 3, 3, 3, 3]
MODELS = ("tiny_model_folder", "modernbert_folder", "nomic_bert_folder")


class DensePattern(Pattern):
    """All tokens of a batch behind C context vectors as one sequence.

    Who sees whom is a bias for every pair.
    """

    def __init__(self, model, lengths, windows, num_context, temperature):
        self._model, self._num_context, self._temperature = model, num_context, temperature
        self._row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self._window = torch.tensor(windows)[self._row]
        self._is_landmark = torch.cat([self._row[1:] != self._row[:-1], torch.tensor([True])])
        self._place = torch.cat([torch.arange(length) for length in lengths])
        self._seen = {
            is_local: self._pairs(is_local)
            for is_local in ({False} if model.shape.local_radius is None else {False, True})
        }

    def pack(self, x_BSD):
        return x_BSD[0]

    def unpack(self, x_ND):
        return x_ND[None, self._num_context :]

    def margins(self, *, is_local):
        return 0, 0

    def text(self, x_ND):
        raise AssertionError("nothing here drops the lead")

    without_lead = text

    def rotate_(self, heads_NPd, *, is_local):
        if self._model.rotary:
            text = heads_NPd[self._num_context :]
            table = self._model.rotary[is_local]
            table.rotate_(text, table.at(self._place), self._model.workspace)

    def attend(self, padded_NPd, layer, *, is_local, drop_lead):
        heads, num_context = self._model.shape.num_heads, self._num_context
        query, key, value = padded_NPd.transpose(0, 1).split([heads] * 3)
        shown, is_other = self._seen[is_local]
        mixed = torch.empty(heads, *query.shape[1:])
        for first in range(0, len(shown), QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            text = max(0, num_context - first)
            for head in range(heads):
                logits = (
                    query[head, rows] @ key[head].T / (self._temperature * query.shape[2] ** 0.5)
                    + shown[rows]
                )
                logits[text:, :num_context] += self._model.own_tensors[CONTEXT_GATES][layer, head]
                logits += is_other[rows] * self._model.own_tensors[LANDMARK_GATES][layer, head]
                mixed[head, rows] = logits.softmax(1) @ value[head]
        return mixed.transpose(0, 1).flatten(1)

    def _pairs(self, is_local):
        """Return a bias, 0 for attended pairs and -inf for others, and a mask of the pairs behind a gate."""
        num_context = self._num_context
        is_own = self._row[:, None] == self._row
        is_other = ~is_own & (self._window[:, None] == self._window) & self._is_landmark
        if is_local:
            is_own = is_own & ((self._place[:, None] - self._place).abs() <= self._model.shape.local_radius)
        shown = torch.zeros(num_context + len(self._row), num_context + len(self._row))
        shown[:num_context] = CLOSED
        shown[:num_context, :num_context] = torch.eye(num_context).log() if is_local else 0.0
        shown[num_context:, num_context:].masked_fill_(~(is_own | is_other), CLOSED)
        return shown, torch.nn.functional.pad(is_other, (num_context, 0, num_context, 0))


@torch.inference_mode()
def _naive(model, ids, lengths, windows, context, temperature=1.0):
    rows = [model.embed_tokens(row[None])[0] for row in np.split(ids, np.cumsum(lengths)[:-1])]
    context = np.zeros((0, model.context_dim), np.float32) if context is None else context
    pattern = DensePattern(model, lengths, windows, len(context), temperature)
    return model.encode_pattern(torch.cat([model.embed_context(context), *rows])[None], pattern)[0]


def _ours(model, ids, lengths, windows, context, temperature=1.0):
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    ids_BT = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows])
    hidden = LandmarkReader(model, context).hidden_states(
        ids_BT, np.array(lengths), np.array(windows), temperature
    )
    return torch.cat([hidden[row, :length] for row, length in enumerate(lengths)])


def _context(model, count=5, seed=0):
    return np.random.default_rng(seed).normal(size=(count, model.context_dim)).astype(np.float32)


def _ids(model, num_tokens, seed=0):
    return np.random.default_rng(seed).integers(5, len(model.token_embeddings), num_tokens)


@pytest.fixture
def model(request, tiny_model_folder):
    """A tiny model with gates of its own in every layer and head."""
    folder = request.getfixturevalue(getattr(request, "param", "tiny_model_folder"))
    loaded = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    generator = torch.Generator().manual_seed(5)
    shape = (loaded.num_layers, loaded.shape.num_heads)
    loaded.own_tensors = {name: torch.randn(shape, generator=generator) for name in GATE_NAMES}
    return loaded


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_context", [0, 5])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_reader_batch_of_windows_equals_dense_reference(model, num_context, temperature):
    ids, context = _ids(model, sum(LENGTHS)), _context(model, num_context) if num_context else None
    ours = _ours(model, ids, LENGTHS, WINDOWS, context, temperature)
    torch.testing.assert_close(
        ours, _naive(model, ids, LENGTHS, WINDOWS, context, temperature), atol=1e-5, rtol=0
    )


@pytest.mark.slow
def test_reader_document_of_8192_tokens_in_one_window_equals_dense_reference(model):
    lengths = [66] * 124 + [8]
    ids = _ids(model, sum(lengths))
    assert len(ids) == 8_192
    context = _context(model)
    ours = _ours(model, ids, lengths, [0] * len(lengths), context)
    torch.testing.assert_close(
        ours, _naive(model, ids, lengths, [0] * len(lengths), context), atol=1e-5, rtol=0
    )


def test_reader_leaves_the_context_as_it_was(model):
    context = _context(model)
    before = context.copy()
    _ours(model, _ids(model, sum(LENGTHS)), LENGTHS, WINDOWS, context)
    np.testing.assert_array_equal(context, before)


def test_reader_runs_the_context_through_the_layers_once_for_each_temperature(model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        model, "embed_context", lambda context, embed=model.embed_context: seen.append(1) or embed(context)
    )
    reader = LandmarkReader(model, _context(model))
    ids = _ids(model, 24).reshape(2, 12)
    for temperature in (1.0, 0.8, 1.0, 0.8):
        reader.hidden_states(ids, np.array([12, 12]), np.array([0, 0]), temperature)
    assert len(seen) == 2


def _layout(sizes_of_texts, model, **settings):
    sizes = [size for text in sizes_of_texts for size in text]
    offsets = np.cumsum([0, *sizes])
    chunks = Chunks(token_offsets=offsets, chunk_offsets=np.cumsum([0, *map(len, sizes_of_texts)]))
    special = {"cls_id": model.cls_id, "landmark_id": model.landmark_id, "pooling": "mean"}
    ids = _ids(model, offsets[-1]).astype(np.int32)
    return lay_out(ids, chunks, attention="chunk", **special), lay_out(
        ids, chunks, attention="landmark", **special, max_window_tokens=60, overlap_tokens=20
    )


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_embed_chunks_any_batches_of_windows_give_the_embeddings_of_each_window_alone(
    model, batch_tokens, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    _, rows = _layout([[10, 10, 3], [10] * 12, [0], [5, 9], [10] * 4], model)
    ours = embed_chunks(
        model, rows, batch_tokens=batch_tokens, landmarks=LandmarkReader(model, _context(model))
    )
    reader = LandmarkReader(model, _context(model))
    naive = np.empty_like(ours)
    for window in np.unique(rows.window_R):
        rows_W = np.flatnonzero(rows.window_R == window)
        ids_BT, lengths_B = pad_rows(rows, rows_W, 0)
        hidden = reader.hidden_states(ids_BT, lengths_B, np.zeros(len(rows_W), np.int64)).numpy()
        for chunk in np.flatnonzero(np.isin(rows.pooled_row, rows_W)):
            own = hidden[
                rows.pooled_row[chunk] - rows_W[0], rows.pooled_start[chunk] : rows.pooled_end[chunk]
            ]
            naive[chunk] = own.mean(0)
    np.testing.assert_allclose(ours, naive, atol=1e-5)


def test_embed_chunks_closed_gates_equal_chunk_attention(model):
    model.own_tensors |= {LANDMARK_GATES: torch.full_like(model.own_tensors[LANDMARK_GATES], CLOSED)}
    alone, rows = _layout([[10, 10, 3], [10] * 12, [0]], model)
    ours = embed_chunks(model, rows, batch_tokens=100, landmarks=LandmarkReader(model))
    np.testing.assert_allclose(ours, embed_chunks(model, alone, batch_tokens=100), atol=1e-5)


def test_reader_of_a_model_that_is_not_one_transformer_is_refused(make_cde):
    of_two = load_backbone(EncoderConfig(model=str(make_cde(1)), precision="fp32"))
    with pytest.raises(ConfigError, match="must go with a model of one transformer, got CdeBackbone"):
        LandmarkReader(of_two)


def test_reader_of_a_causal_model_is_refused(model):
    model.shape = dataclasses.replace(model.shape, is_causal=True)
    with pytest.raises(ConfigError, match="must go with a model that reads both ways"):
        LandmarkReader(model)
