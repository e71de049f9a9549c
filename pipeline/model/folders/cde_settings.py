"""What the config.json of a CDE checkpoint says: that it is one, and how its authors use it. Loads no torch.

use_context                       read the collection's context, which the model was trained behind
query_prefix, document_prefix     ``query_prompt`` and ``document_prompt`` of the file, else those published
pool_prefix                       the mean takes a prefix in unless ``pool_ignore_instruction_tokens``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

QUERY_PREFIX: Final = "search_query: "
DOCUMENT_PREFIX: Final = "search_document: "

_ARCHITECTURE: Final = "transductive"
_CLASSES: Final = frozenset({"DatasetTransformer", "ContextualDocumentEmbeddingTransformer"})


def is_cde(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json is that of a two-stage CDE model; it has no ``model_type``."""
    return config.get("architecture") == _ARCHITECTURE or bool(
        _CLASSES & set(config.get("architectures") or ())
    )


def cde_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoder settings that such a configuration brings."""
    return {
        "use_context": True,
        "query_prefix": str(config.get("query_prompt", QUERY_PREFIX)),
        "document_prefix": str(config.get("document_prompt", DOCUMENT_PREFIX)),
        "pool_prefix": not config.get("pool_ignore_instruction_tokens", False),
    }
