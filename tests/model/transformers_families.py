"""Tiny random checkpoints of families that transformers runs, in the layout it publishes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.model import published

SIZES = published.SIZES | {"pad_token_id": 0}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
DECODER_SIZES = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "data2vec-text": ("Data2VecText", SIZES),
    "gemma3_text": (
        "Gemma3Text",
        {**DECODER_SIZES, "use_bidirectional_attention": True, "sliding_window": 9},
    ),
    "eurobert": ("EuroBert", DECODER_SIZES),
    "t5": ("T5Encoder", T5_SIZES),
    "mt5": ("MT5Encoder", T5_SIZES),
    "electra": ("Electra", {**SIZES, "embedding_size": 16}),
    "albert": ("Albert", {**SIZES, "embedding_size": 16}),
    "deberta": ("Deberta", {**SIZES, **RELATIVE}),
    "deberta-v2": ("DebertaV2", {**SIZES, **RELATIVE}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", SIZES),
    "bart": (
        "Bart",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 96,
        },
    ),
}
MakeFamily = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_family(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeFamily:
    """Return a writer of tiny random checkpoints in the layout that transformers publishes."""

    @cache
    def make(family: str) -> Path:
        name, sizes = FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="$A [SEP]" if "t5" in family else "[CLS] $A [SEP]",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        torch.manual_seed(0)
        config_name = f"{name.removesuffix('Encoder')}Config"
        config = getattr(transformers, config_name)(vocab_size=tokenizer.get_vocab_size(), **sizes)
        model = getattr(transformers, f"{name}Model")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
        return folder

    return make
