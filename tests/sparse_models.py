"""A tiny random model for masked tokens as a sparse encoder, in the three layouts they are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from tests.tiny_models import make_tiny_model

Layout = Literal["plain", "modules", "router"]
PACKAGE = "sentence_transformers.sparse_encoder.models"


def make_sparse_model(
    folder: Path,
    layout: Layout = "plain",
    model_type: str = "bert",
    *,
    activation: str = "relu",
    pooling: str = "max",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write one; a router's queries weigh their tokens by a table, in which token n weighs 1 + n / 10."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForMaskedLM

    inner = folder / "document_0_MLMTransformer" if layout == "router" else folder
    made = make_tiny_model(inner)
    vocab_size = json.loads((made / "config.json").read_text())["vocab_size"]
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if model_type == "distilbert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    else:
        sizes["intermediate_size"] = 64
    settings = {"vocab_size": vocab_size, "max_position_embeddings": 97, "pad_token_id": 0, **sizes, **config}
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():  # those of transformers' own hardly differ between tokens
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(inner)
    if layout == "plain":
        return folder
    pool = {"pooling_strategy": pooling, "activation_function": activation}
    pool_folder = folder / ("1_SpladePooling" if layout == "modules" else "document_1_SpladePooling")
    pool_folder.mkdir()
    (pool_folder / "config.json").write_text(json.dumps(pool))
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    if layout == "router":
        modules = [("", "Router")]
        structure = {
            "query": ["query_0_SparseStaticEmbedding"],
            "document": ["document_0_MLMTransformer", "document_1_SpladePooling"],
        }
        types = {
            name: f"{PACKAGE}.{name[name.rindex('_') + 1 :]}"
            for names in structure.values()
            for name in names
        }
        (folder / "router_config.json").write_text(json.dumps({"types": types, "structure": structure}))
        query = folder / "query_0_SparseStaticEmbedding"
        query.mkdir()
        save_file({"weight": 1 + torch.arange(vocab_size) / 10}, query / "model.safetensors")
        (query / "tokenizer.json").write_bytes((inner / "tokenizer.json").read_bytes())
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"{PACKAGE}.{kind}"}
        for place, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def reference_weights(folder: Path, texts: list[str], *, twice: bool = False) -> list[dict[int, float]]:
    """Weigh texts by transformers alone: log(1 + relu(logits)), the highest of each text's tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForMaskedLM

    inner = folder / "document_0_MLMTransformer"
    inner = inner if inner.is_dir() else folder
    model = AutoModelForMaskedLM.from_pretrained(inner).eval()
    tokenizer = Tokenizer.from_file(str(inner / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    found: list[dict[int, float]] = []
    for text in texts:
        ids = [cls, *tokenizer.encode(text, add_special_tokens=False).ids, sep]
        with torch.no_grad():
            weights = torch.log1p(torch.relu(model(torch.tensor([ids])).logits[0])).amax(dim=0)
        weights = torch.log1p(weights) if twice else weights
        found.append({token: weight for token, weight in enumerate(weights.tolist()) if weight > 0})
    return found
