"""Any encoder of the installed transformers that the engine has no family for: padded rows in, states out.

    config.json ─▶ AutoModel, or the encoder of a model of two halves ─▶ last_hidden_state

It gives states of tokens, so poolings, windows and token vectors work as elsewhere. It has no context, no
temperature and no first layers, and runs on torch alone. Weights are safetensors, and no remote code is run.
A weight that the file lacks is refused, where the library would draw a random one. Tokens are those of the
model's tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.backbone import Backbone, ContextRows, Ids, Lengths
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.model_types import LACKED_BY_TRANSFORMERS, MODEL_TYPES
from jaxtyping import Float, Float32

UNBOUND_POSITIONS: Final = 8_192
"""Tokens of a row at most where positions are relative and the configuration names no length."""

_FP32_ALONE: Final = frozenset({"deberta"})
"""Types whose code in transformers mixes fp32 into what it computes, and fails in another precision."""

_UNUSED: Final = ("pooler.", "embeddings.position_ids")
"""Weights behind the last states, or none at all; a file may lack them."""


class TransformersBackbone(Backbone):
    """A model that transformers runs."""

    lacks = LACKED_BY_TRANSFORMERS

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        is_fp32_alone = checkpoint.config.get("model_type") in _FP32_ALONE
        super().__init__(checkpoint, torch.float32 if is_fp32_alone else dtype, device)
        _require_frame(checkpoint)
        self._model = load_model(checkpoint, self.dtype).to(device)
        self.max_positions = max_positions(self._model, checkpoint)
        self._table = self._model.get_input_embeddings().weight
        # Whether it reads tokens, and how wide its states are, is seen by asking it.
        try:
            states_BTD = self.hidden_states(np.array([[self.landmark_id]]), np.array([1]))
        except Exception as error:
            raise ModelError(
                f"a model of type {self.config.get('model_type')} must turn token ids into states, got "
                f"{type(error).__name__} from transformers; choose a text encoder"
            ) from error
        self.model_dim = self.context_dim = int(states_BTD.shape[2])

    @property
    def num_embeddings(self) -> int:
        """Return how many token ids the input table has."""
        return len(self._table)

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary E"]:
        """Return the input table, one row a token id; some families have narrower ones than their states."""
        return self._table.detach().float().cpu().numpy()

    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states; see the base."""
        assert (context_CD, temperature) == (None, 1.0), "settings were checked"
        self.require_room(ids_BT.shape[1])
        is_text_BT = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
        with torch.inference_mode():
            return self._model(
                input_ids=torch.from_numpy(ids_BT).to(self.device),
                attention_mask=torch.from_numpy(is_text_BT.astype(np.int64)).to(self.device),
            ).last_hidden_state


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, auto_class: Any = None) -> Any:
    """Return the model in inference mode, its weights in memory of its own; None takes its encoder."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoConfig, AutoModel, AutoModelForTextEncoding

    model_type = checkpoint.config.get("model_type")
    for name, tensor in checkpoint.tensors.items():
        require_floats(name, tensor)
    offline: Any = {"trust_remote_code": False, "local_files_only": True}
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder, **offline)
        except Exception as error:
            raise ModelError(
                f"model_type must be one of {', '.join(MODEL_TYPES)}, or one that the installed transformers "
                f"runs without remote code, got {model_type!r}; choose another model, or update transformers"
            ) from error
        has_encoder = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
        auto_class = auto_class or (AutoModelForTextEncoding if has_encoder else AutoModel)
        try:
            model, report = auto_class.from_pretrained(
                checkpoint.folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **offline,
            )
        except Exception as error:
            raise ModelError(
                f"a model of type {model_type} must load in transformers, got {type(error).__name__}; fetch "
                "the model again, or choose another one"
            ) from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(_UNUSED))
    if missing:
        raise ModelError(
            f"the model's weights must hold {missing[0]}, got none; the file does not fit its "
            "config.json, or needs code of its own, which is not run"
        )
    if getattr(config, "is_encoder_decoder", False) and not has_encoder:
        model = model.get_encoder()
    for parameter in model.parameters():
        # The file may be mapped: what becomes of it must not matter.
        parameter.data = parameter.data.clone()
    return model.eval()


@contextmanager
def _quiet() -> Generator[None]:
    """Keep transformers from writing of heads that are left out, and of its progress."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def max_positions(model: Any, checkpoint: Checkpoint) -> int:
    """Return the longest row: of the table of learned positions, else as the configuration says."""
    learned = next(
        (
            module
            for name, module in model.named_modules()
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
        ),
        None,
    )
    if learned is not None:
        # RoBERTa and its kin count from behind the padding id.
        before = 0 if learned.padding_idx is None else learned.padding_idx + 1
        return learned.num_embeddings - before
    named = ("max_position_embeddings", "n_positions", "max_sequence_length")
    return checkpoint.integer(*named, default=UNBOUND_POSITIONS)


def _require_frame(checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer that frames texts by more than one token on a side."""
    tokenizer = checkpoint.tokenizer
    framed, own = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    opening, closing = framed[: len(framed) - len(own)][:1], framed[-1:]
    if framed not in (own, [*opening, *own], [*own, *closing], [*opening, *own, *closing]):
        raise ModelError(
            "the model's tokenizer must put at most one token before a text and one behind it, got "
            f"{[tokenizer.id_to_token(token) for token in framed]} for 'a'; choose another model"
        )
