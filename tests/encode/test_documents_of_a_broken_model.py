from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError

from tests.model.wrapped_backbone import WrappedBackbone

TEXTS = [
    "the cat sat on the mat.",
    "old stone path " * 30,
    "😀 \u200b",
    "\u200b",
    "walking mountains, rivers; " * 12 + "end",
    "a",
    "x" * 90 + " cat",
]


class _Broken(WrappedBackbone):
    """A backbone that fails on rows holding one token, or when more rows come than the device can hold."""

    def __init__(self, backbone, nan_id=None, max_rows=None):
        super().__init__(backbone)
        self._backbone, self._nan_id, self._max_rows = backbone, nan_id, max_rows
        # Only a device of its own runs out of memory in a way that a smaller batch mends; the tensors stay
        # where they are.
        self.device = torch.device("cuda") if max_rows else backbone.device

    def hidden_states(self, ids_BT, lengths_B, context_CD=None, temperature=1.0):
        if self._max_rows is not None and len(ids_BT) > self._max_rows:
            raise torch.OutOfMemoryError
        hidden = self._backbone.hidden_states(ids_BT, lengths_B, context_CD, temperature).clone()
        if self._nan_id is not None:
            hidden[torch.from_numpy((ids_BT == self._nan_id).any(1))] = float("nan")
        return hidden


def test_encode_nan_from_the_model_names_the_document(config, backbone):
    broken = _Broken(backbone, nan_id=backbone.tokenizer.token_to_id("walk"))
    with pytest.raises(
        ModelError, match="chunk 0 of document 4 of those encoded together; check the model's weights"
    ):
        DocumentEncoder(config, None, broken).encode(TEXTS)


def test_encode_queries_nan_from_the_model_names_the_query(config, backbone):
    broken = _Broken(backbone, nan_id=backbone.tokenizer.token_to_id("walk"))
    with pytest.raises(ModelError, match="chunk 0 of query 1 of those encoded together"):
        DocumentEncoder(config, None, broken).encode_queries(["old path", "walk"])


def test_encode_out_of_memory_gives_the_same_vectors_in_smaller_batches(config, backbone):
    expected = DocumentEncoder(config, None, backbone).encode(TEXTS)
    small = DocumentEncoder(config, None, _Broken(backbone, max_rows=2)).encode(TEXTS)
    np.testing.assert_allclose(small.chunk_vectors_MV, expected.chunk_vectors_MV, atol=1e-5)
