"""Public encoders of families that Cairn reads, and what each brings; sizes are those their authors state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PublicModel:
    """One encoder of the Hugging Face hub; ``width`` is that of its vectors."""

    name: str
    million_parameters: int
    width: int
    brings: str


_LONG: Final = "rows of 8,192 tokens"

PUBLIC_MODELS: Final = (
    PublicModel("sentence-transformers/all-MiniLM-L12-v2", 33, 384, "English"),
    PublicModel("BAAI/bge-small-en-v1.5", 33, 384, "English"),
    PublicModel("BAAI/bge-base-en-v1.5", 109, 768, "English"),
    PublicModel("intfloat/multilingual-e5-small", 118, 384, "100 languages"),
    PublicModel("nomic-ai/nomic-embed-text-v1.5", 137, 768, f"English, {_LONG}, --dims"),
    PublicModel("Alibaba-NLP/gte-modernbert-base", 149, 768, f"English, {_LONG}"),
    PublicModel("Alibaba-NLP/gte-multilingual-base", 305, 768, f"70 languages, {_LONG}, --dims"),
    PublicModel("jxm/cde-small-v1", 281, 768, "English, reads the context"),
    PublicModel("jxm/cde-small-v2", 306, 768, "English, reads the context"),
    PublicModel("Qwen/Qwen3-Embedding-0.6B", 596, 1024, "100 languages, long rows, --dims"),
    PublicModel("nvidia/NV-Embed-v2", 7850, 4096, "English, latent pooling; not for commercial use"),
)
