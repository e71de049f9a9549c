"""What the folder of a learned sparse encoder says, in the three layouts they are published in.

    SPLADE's own             config.json and weights of a model for masked tokens, nothing else
    Sentence-Transformers    modules.json: Transformer or MLMTransformer ─▶ SpladePooling
    inference-free           modules.json: Router, whose router_config.json names the modules of documents, as
                             above, and SparseStaticEmbedding for queries: one weight a token

Reads JSON only: no torch.

Sources: Formal et al. 2021 (SPLADE v2), eq. 1 and 6; Geng et al. 2024 ("Towards Competitive Search Relevance
For Inference-Free Learned Sparse Retrievers").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    MODULES_NAME,
    SETTINGS_NAME,
    folder_inside,
    module_list,
    prompts_of,
    read_json,
    read_json_if_any,
    routes_of,
)

IDF_NAME: Final = "idf.json"
_MASKED: Final = ("Transformer", "MLMTransformer")
_STATIC: Final = ["SparseStaticEmbedding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFolder:
    """Where the transformer lies and how its logits become weights.

    ``takes_log_twice``: weights are log(1 + log(1 + x)) of a positive logit x, else log(1 + x). ``table`` is
    the folder of the weights of queries' tokens, None where the transformer reads queries, too.
    """

    transformer: Path
    takes_log_twice: bool = False
    table: Path | None = None
    query_prompt: str = ""
    document_prompt: str = ""


def read_sparse_folder(folder: Path) -> SparseFolder:
    """Read such a folder; raise :class:`ModelError` for one of another kind."""
    if not (folder / MODULES_NAME).is_file():
        read_json(folder / "config.json")
        return SparseFolder(transformer=folder, table=folder if (folder / IDF_NAME).is_file() else None)
    modules = [
        (_kind(each.get("type")), folder_inside(folder, each.get("path"))) for each in module_list(folder)
    ]
    queries = modules
    if [kind for kind, _ in modules] == ["Router"]:
        queries, modules = routes_of(modules[0][1])
    kinds = [kind for kind, _ in modules]
    if len(kinds) != 2 or kinds[0] not in _MASKED or kinds[1] != "SpladePooling":
        raise ModelError(
            "a sparse encoder must be a transformer for masked tokens and SpladePooling, got the modules "
            f"{', '.join(kinds) or 'of no documents'}; give a SPLADE model, or this one as --model"
        )
    is_static = [kind for kind, _ in queries] == _STATIC
    if not is_static and queries != modules:
        raise ModelError(
            "queries of a sparse encoder must be read as documents or by SparseStaticEmbedding, got "
            f"{', '.join(kind for kind, _ in queries) or 'no modules'}; choose another model"
        )
    query_prompt, document_prompt = prompts_of(read_json_if_any(folder / SETTINGS_NAME))
    return SparseFolder(
        transformer=modules[0][1],
        takes_log_twice=_takes_log_twice(read_json_if_any(modules[1][1] / "config.json")),
        table=queries[0][1] if is_static else None,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
    )


def _takes_log_twice(pooling: Mapping[str, Any]) -> bool:
    strategy = pooling.get("pooling_strategy", "max")
    activation = pooling.get("activation_function", "relu")
    if strategy != "max" or activation not in ("relu", "log1p_relu"):
        raise ModelError(
            "SpladePooling of the model must take the max of relu or log1p_relu, got "
            f"{strategy!r} of {activation!r}; choose another model"
        )
    return activation == "log1p_relu"


def _kind(name: object) -> str:
    return str(name).rpartition(".")[2]
