"""The folders decoders come in: below any prefix, inside an NV-Embed, with a byte-level tokenizer.

What does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.latent_attention import read_latent_attention
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.model.published import LENGTHS, load, published, published_hidden, random_ids


@pytest.mark.parametrize("num_layers", [None, 1])
def test_nv_embed_is_the_mistral_it_holds(
    make_nv_embed: Callable[..., Path], make: Callable[..., Path], num_layers: int | None
) -> None:
    outer, inner = (
        load(make_nv_embed(), layers=num_layers),
        load(make("mistral"), layers=num_layers),
    )
    ids = random_ids(outer)
    assert torch.equal(outer.hidden_states(ids, LENGTHS), inner.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize("prefix", ["", "old stone:"])
def test_encode_with_nv_embed_is_the_mean_of_latent_attention_without_the_instruction(
    make_nv_embed: Callable[..., Path], make: Callable[..., Path], prefix: str
) -> None:
    folder = make_nv_embed(2)
    config = encoder_config({"model": str(folder), "precision": "fp32", "query_prefix": prefix})
    assert config.pooling == "latent"
    encoder = DocumentEncoder(config)
    texts = ["the cat sat on the mat", "a river", "old path " * 9]
    tokenizer, model = encoder.backbone.tokenizer, published(make("mistral"))
    block = read_latent_attention(
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
        model_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert block is not None
    for vector, text in zip(encoder.encode_queries(texts), texts, strict=True):
        before, own = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prefix, text))
        ids = np.array([[2, *before, *own, 3]])
        states = block(published_hidden(model, ids, np.array([ids.shape[1]]), is_causal=False))[0]
        mean = states[1 + len(before) if prefix else 0 :].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("inner", [None, [], {"model_type": "gemma"}])
def test_nv_embed_without_its_language_model_is_refused(
    make_nv_embed: Callable[..., Path], inner: Any
) -> None:
    folder = make_nv_embed()
    (folder / "config.json").write_text(json.dumps({"model_type": "nvembed", "text_config": inner}))
    with pytest.raises(
        ModelError, match="text_config of an NV-Embed must describe a model of type bidir_mistral"
    ):
        load(folder)


@pytest.fixture(scope="module")
def qwen_folder(make: Callable[..., Path]) -> Path:
    """A decoder with a byte-level tokenizer as Qwen's embedding models have it.

    No BOS, an ending of its own, another eos_token.
    """
    from tokenizers import decoders, models, pre_tokenizers, processors

    folder = make("qwen3", vocab_size=None)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġt", "Ġth", "Ġthe", "th", "the"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("t", "h"), ("th", "e")]
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    ending = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", ending)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    size = tokenizer.get_vocab_size()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.randn(size, 32, generator=torch.Generator().manual_seed(6))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return folder


def test_encode_causal_with_last_pooling_equals_the_last_token_of_the_published_model(
    qwen_folder: Path,
) -> None:
    texts = ["the way", "a mat, the 😀 stone", ""]
    config = EncoderConfig(model=str(qwen_folder), precision="fp32", causal=True, pooling="last")
    vectors = DocumentEncoder(config).encode(texts).document_vectors_NV
    model, tokenizer = published(qwen_folder), Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))
    for vector, text in zip(vectors, texts, strict=True):
        with torch.inference_mode():
            last = model(
                input_ids=torch.tensor([tokenizer.encode(text).ids]), use_cache=False
            ).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, (last / last.norm()).numpy(), atol=1e-5)


def test_encode_with_a_byte_level_tokenizer_covers_every_text(qwen_folder: Path) -> None:
    texts = ["the 😀👩‍🚀 stone, the mat " * 9, "é" * 50, "\n\t the"]
    encoded = DocumentEncoder(
        EncoderConfig(model=str(qwen_folder), precision="fp32", landmark_interval=16)
    ).encode(texts)
    for index, text in enumerate(texts):
        own = slice(*encoded.chunk_offsets[index : index + 2])
        assert (
            "".join(
                text[start:end]
                for start, end in zip(encoded.start_char[own], encoded.end_char[own], strict=True)
            )
            == text
        )
