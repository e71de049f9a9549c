"""A cross-encoder as reranker: Sentence-Transformers' own class on a local model in safetensors.

It reads query and passage together, at most :data:`MAX_TOKENS` of both. Its logit becomes a score from 0 to
1, which ranks as it does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError, ModelError, extra_missing
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.names import how_to_get, model_folder
from jaxtyping import Float64

MAX_TOKENS: Final = 512
BATCH_PAIRS: Final = 32
_SPARE_POSITIONS: Final = 2
"""RoBERTa and its kin count positions from behind the padding id."""

_UNSAID_LABELS: Final = 2
"""What transformers takes where a configuration says nothing."""


class CrossEncoderReranker:
    """Scores pairs of a query and a passage; safe to share between threads."""

    def __init__(self, model: str) -> None:
        """Load a model by name or folder, offline; one that has not one score raises :class:`ConfigError`."""
        try:
            folder = model_folder(model)
        except ConfigError:
            raise ConfigError(
                "the rerank model must be a folder with a cross-encoder or a name in the Hugging Face cache, "
                f"such as cross-encoder/ms-marco-MiniLM-L6-v2, got {model!r}; {how_to_get(model)}"
            ) from None
        config = _config(folder, model)
        self._folder = folder
        try:
            import torch
            from sentence_transformers import CrossEncoder
            from transformers.utils import logging as transformers_logging
        except ModuleNotFoundError as error:
            raise extra_missing(
                error,
                what="reranking",
                module="sentence_transformers",
                package="sentence-transformers",
                extra="rerank",
            ) from None
        try:
            transformers_logging.disable_progress_bar()
            positions = int(config.get("max_position_embeddings", MAX_TOKENS)) - _SPARE_POSITIONS
            self._model: Any = CrossEncoder(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
                max_length=min(MAX_TOKENS, positions),
                activation_fn=torch.nn.Identity(),
            )
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            raise ModelError(
                f"the rerank model {model!r} must load as a cross-encoder in safetensors, got {why}"
            ) from error
        finally:
            transformers_logging.enable_progress_bar()

    def score(self, query: str, texts: Sequence[str]) -> Float64[np.ndarray, " N"]:
        """Return a score from 0 to 1 for each text; what the model raises becomes :class:`ModelError`."""
        return 1.0 / (1.0 + np.exp(-self.logits(query, texts)))

    def logits(self, query: str, texts: Sequence[str]) -> Float64[np.ndarray, " N"]:
        """Return the logit of each text; see above."""
        try:
            logits = self._model.predict(
                [(query, text) for text in texts], batch_size=BATCH_PAIRS, show_progress_bar=False
            )
        except Exception as error:
            raise ModelError(
                f"the rerank model must score every passage, got {type(error).__name__}"
            ) from error
        return np.asarray(logits, dtype=np.float64)

    @property
    def fingerprint(self) -> str:
        """Identify the model by the bytes of its configuration, tokenizer and weights."""
        kinds = (".json", ".safetensors", ".txt")
        files = sorted(path for path in self._folder.rglob("*") if path.suffix in kinds)
        hashes = {path.name: durable.sha256_of_file(path) for path in files}
        return fingerprint(kind="cross-encoder", files=hashes)


def _config(folder: Path, model: str) -> dict[str, Any]:
    """Read what the model says of itself; the library would give one without a head random weights."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the rerank model must have a config.json that can be read, got {model!r} "
            f"({type(error).__name__})"
        ) from None
    architectures = map(str, config.get("architectures") or [])
    has_head = any(name.endswith("ForSequenceClassification") for name in architectures)
    labels = len(config.get("id2label") or ()) or int(config.get("num_labels", _UNSAID_LABELS))
    if not has_head or labels != 1:
        found = f"{labels} scores" if has_head else "no head for one"
        raise ConfigError(
            "the rerank model must be a cross-encoder with one score, such as "
            f"cross-encoder/ms-marco-MiniLM-L6-v2, got {model!r}, which has {found}"
        )
    return config
