"""Both stages of CDE (§4.2, eq. 5 and 6) with landmarks in NumPy, from a BERT's tensors and tokens."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.context.store import build_context
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from safetensors.numpy import load_file

HEADS = 4
CONTEXT = ["the river sat", "old stone on the path", "a mountain"]
TEXTS = ["the cat sat on the old mat by a river and the stone marks a path", "walking way"]


def bert_states(tensors: dict[str, np.ndarray], ids: list[int], context_CD: np.ndarray) -> np.ndarray:
    """Return the states of a text's tokens; the vectors before it have no position, and all see all."""

    def linear(name: str, x_TD: np.ndarray) -> np.ndarray:
        return x_TD @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, x_TD: np.ndarray) -> np.ndarray:
        unit_TD = (x_TD - x_TD.mean(1, keepdims=True)) / x_TD.std(1, keepdims=True)
        return unit_TD * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    words, places, types = (
        tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    x_TD = np.concatenate([context_CD, words[ids] + places[: len(ids)]]) + types[0]
    x_TD = norm("embeddings.LayerNorm", x_TD)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        of_heads = (
            np.split(linear(f"{layer}.attention.self.{name}", x_TD), HEADS, axis=1)
            for name in ("query", "key", "value")
        )
        mixed: list[np.ndarray] = []
        for queries_TH, keys_TH, values_TH in zip(*of_heads, strict=True):
            weights_TT = np.exp(queries_TH @ keys_TH.T / np.sqrt(keys_TH.shape[1]))
            mixed.append(weights_TT / weights_TT.sum(1, keepdims=True) @ values_TH)
        attended_TD = linear(f"{layer}.attention.output.dense", np.concatenate(mixed, axis=1))
        x_TD = norm(f"{layer}.attention.output.LayerNorm", x_TD + attended_TD)
        inner_TD = linear(f"{layer}.intermediate.dense", x_TD)
        inner_TD *= (1 + np.vectorize(math.erf)(inner_TD / np.sqrt(2))) / 2
        x_TD = norm(f"{layer}.output.LayerNorm", x_TD + linear(f"{layer}.output.dense", inner_TD))
    return x_TD[len(context_CD) :]


def test_chunk_vectors_behind_a_context_equal_both_stages_in_numpy(tiny_model_folder, tokenizer):
    settings = EncoderConfig(
        model=str(tiny_model_folder), precision="fp32", pooling="lmk", attention="full", use_context=True,
        landmark_interval=8, window_tokens=96, window_overlap_tokens=0, token_bytes=0,
    )  # fmt: skip
    backbone, drawn = load_backbone(settings), ContextConfig(context_documents=3)
    first = ContextEncoder.of(backbone, settings, drawn)
    sample = pa.table({"doc_id": list("abc"), "text": CONTEXT, "content_sha256": list("abc")})
    context = build_context(sample, np.zeros(3, np.int32), drawn, first.embed, first.fingerprint)
    encoded = DocumentEncoder(settings, context, backbone).encode(TEXTS)

    tensors = {
        name: x.astype(float) for name, x in load_file(tiny_model_folder / "model.safetensors").items()
    }

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    ([cls_id], [landmark_id]), none = map(ids, ("[CLS]", "[SEP]")), np.zeros((0, 32))
    rows = [[cls_id, *ids(text), landmark_id] for text in CONTEXT]
    context_CD = np.stack([bert_states(tensors, row, none).mean(0) for row in rows])
    offsets, expected = encoded.chunk_offsets.tolist(), list[np.ndarray]()
    for text, first_chunk, end in zip(TEXTS, offsets[:-1], offsets[1:], strict=True):
        row, landmarks = [cls_id], list[int]()
        for chunk in range(first_chunk, end):
            row += [*ids(text[encoded.start_char[chunk] : encoded.end_char[chunk]]), landmark_id]
            landmarks.append(len(row) - 1)
        expected.append(bert_states(tensors, row, context_CD)[landmarks])
    assert offsets[1] >= 2
    expected_MD = np.concatenate(expected)
    expected_MD /= np.linalg.norm(expected_MD, axis=1, keepdims=True)
    np.testing.assert_allclose(encoded.chunk_vectors_MV, expected_MD, atol=1e-5)
