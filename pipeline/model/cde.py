"""CDE's two stages from one published checkpoint: M1 embeds context documents, M2 reads them before a text.

    M1   text ─▶ backbone ─▶ mean ─▶ Linear · GELU · Linear ─▶ a context vector, not normalised
    M2   [J context vectors][8 soft prompts][text] ─▶ backbone ─▶ mean over the text
                                                            ─▶ Linear · ReLU · Linear ─▶ an embedding

The checkpoints are cde-small-v1 and cde-small-v2. The soft prompts are one constant, the prompt projection of
a vector of ones. As in the public code, text passes M2's own embedding layer twice and the lead once:
ModernBERT norms its text twice, NomicBERT adds token type 0 twice.

Positions differ by version. v1 (NomicBERT, ``disable_transductive_rotary_embedding``): context vectors have
none, so their order does not matter; soft prompts and text stand where a whole context of J leaves them, from
position J on. v2 (ModernBERT): positions count from the first context vector on, so order and number matter,
and local layers show a text only the end of its lead. Fewer than J context vectors are read as they are. Null
tokens, a tied token table, other sizes of a stage and other backbones of it are not read: no published
checkpoint has any.

The mean is over the text alone (``pool_ignore_contextual_tokens``), and the output projection has no
residual. Public copies of v1's backbone differ further, in how often token type 0 is added and in what its
rotation counts; here both are as the published inference code has them. Neither version has been compared
with vectors of its published weights.

The checkpoint holds, beside heads and soft prompts, a backbone a stage:

    first_stage_model.embedder.*      of the sizes of the model that ``embedder`` names
    second_stage_model.backbone.*     of the same sizes

The configuration of a named model is ``NAME.json`` in the checkpoint's folder, else the published one known
here, so that a folder means the same on every machine. A tensor that no part reads is refused as one that is
missing is.

Source: Morris & Rush 2024 (CDE), §4.2 and §10.4, and the public checkpoints. Differs: one token per context
document; no decoders as M2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.backbone import Backbone, BackboneOver, ContextRows, Ids, Lengths
from cairn.pipeline.model.engine.pattern import Batch
from cairn.pipeline.model.engine.projection import Projection, ProjectionLayer
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import NotedTensors, WeightReader
from cairn.pipeline.model.families import read_modernbert, read_nomic_bert
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from jaxtyping import Float, Float32

NUM_SOFT_PROMPTS: Final = 8
"""Fixed in the published code; no setting names it."""

_READERS: Final[Mapping[str, Callable[..., Transformer]]] = {
    "modernbert": read_modernbert,
    "nomic_bert": read_nomic_bert,
}


class FirstStage(BackboneOver[Transformer]):
    """M1: a transformer with an MLP behind its pooling; it reads no context itself."""

    takes_document_prefix = True
    lacks = ("document_context",)

    def __init__(self, backbone: Transformer, projection: Projection, max_positions: int) -> None:
        own = {"max_context", "projection", "own_first_stage", "takes_document_prefix", "lacks"}
        super().__init__(backbone, own)
        self.max_positions = min(max_positions, backbone.max_positions)
        self.projection = projection

    @property
    def first_stage(self) -> Backbone:
        """Return the stage that embeds the context: itself, with its MLP, where it is the first."""
        return self.own_first_stage or self

    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the base."""
        assert context_CD is None, "the first stage reads no context"
        return self._backbone.hidden_states(ids_BT, lengths_B, None, temperature)


class CdeBackbone(FirstStage):
    """M2 with its M1."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backbone: Transformer,
        first_stage: FirstStage,
        *,
        is_nomic: bool,
        soft_prompts_LD: torch.Tensor,
        output_projection: Projection,
    ) -> None:
        context_size = checkpoint.integer("transductive_corpus_size")
        num_lead = context_size + len(soft_prompts_LD)
        room = backbone.max_positions - num_lead
        if room < 1:
            raise ModelError(
                f"the backbone of a CDE model must have more positions than the {num_lead} vectors before a "
                f"text, got {backbone.max_positions}; config.json does not fit the model"
            )
        super().__init__(backbone, output_projection, min(_max_seq_length(checkpoint), room))
        self.own_first_stage = first_stage
        self.max_context = self._context_size = context_size
        self.context_dim = first_stage.embedding_dim
        self._is_nomic = is_nomic
        self._is_placed = not (
            is_nomic and checkpoint.config.get("disable_transductive_rotary_embedding", True)
        )
        self._soft_prompts_LD = soft_prompts_LD
        self._type_D = backbone.embed_context(np.zeros((1, backbone.model_dim), np.float32))

    @torch.inference_mode()
    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the base."""
        self.require_room(ids_BT.shape[1])
        context = self._context(context_CD)
        lead_LD = torch.cat([context, self._soft_prompts_LD]) + self._type_D
        text_BTD = self._backbone.embed_tokens(ids_BT)
        text_BTD = text_BTD + self._type_D if self._is_nomic else self._backbone.norm_embeddings(text_BTD)
        x_BSD = torch.cat([lead_LD.expand(len(text_BTD), -1, -1), text_BTD], dim=1)
        batch = Batch(
            lengths_B=lengths_B,
            num_tokens=ids_BT.shape[1],
            num_lead=len(lead_LD),
            num_unplaced=0 if self._is_placed else len(context),
            first_position=0 if self._is_placed else self._context_size,
        )
        return self._backbone.encode_embedded(x_BSD, self._backbone.pattern_of(batch, temperature))

    def _context(self, context_CD: Float32[np.ndarray, "C D"] | None) -> Float32[torch.Tensor, "_ _"]:
        """Return the vectors before the soft prompts."""
        if context_CD is None:
            return torch.zeros((0, self.model_dim), device=self.device)
        if context_CD.shape[1] != self.context_dim or len(context_CD) > self._context_size:
            raise ConfigError(
                f"the context must be at most {self._context_size} rows of {self.context_dim} numbers, "
                f"got shape {context_CD.shape}; draw it with this model, and with fewer documents"
            )
        return torch.from_numpy(context_CD).to(self.device)


def read_cde(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int | None = None,
    run_on: Callable[[Transformer], Transformer] = lambda engine: engine,
) -> CdeBackbone:
    """Read both stages; a tensor that is missing, left over or misshapen raises :class:`ModelError`.

    ``num_layers`` runs the first layers of the second stage; the first stage keeps all of its own. ``run_on``
    gives each stage's engine to the backend.
    """
    for name, allowed in _REQUIRED.items():
        if checkpoint.config.get(name) not in allowed:
            raise ModelError(
                f"{name} of a CDE model must be {allowed[0]!r}, got {checkpoint.config[name]!r}; "
                "choose another model"
            )
    config = _backbone_config(checkpoint)
    tensors = NotedTensors(checkpoint.tensors)
    first_stage, whole = (_stage(checkpoint, prefix, config) for prefix in (FIRST_STAGE, SECOND_STAGE))
    cut = first_layers(whole, num_layers)
    tensors.names |= dict.fromkeys(set(whole.tensors) - set(cut.tensors))
    # The first stage's weights lie in the same file, whose hash is in the checkpoint's fingerprint.
    both = fingerprint(kind="cde", first=first_stage.fingerprint, second=cut.fingerprint)
    first, second = (
        run_on(
            _READERS[config["model_type"]](
                replace(stage, tensors=NotedTensors(stage.tensors, tensors.names)), dtype=dtype, device=device
            )
        )
        for stage in (first_stage, replace(cut, fingerprint=both))
    )

    def read_head(name: str, width: int, output_dim: int, activation: str) -> Projection:
        """Read two projections, numbered 0 and 2 as the modules around their activation are."""
        reader = WeightReader(tensors, f"{name}.0.weight", device)
        layers = (
            (activation, reader.linear(f"{name}.0", (width, width), bias=True)),
            ("Identity", reader.linear(f"{name}.2", (output_dim, width), bias=True)),
        )
        return Projection(
            layers=tuple(ProjectionLayer(kind=kind, weight=x.weight, bias=x.bias) for kind, x in layers),
            output_dim=output_dim,
        )

    mlp = read_head("first_stage_model.mlp", first.model_dim, first.model_dim, "GELU")
    width = second.model_dim
    prompts = read_head("second_stage_model.prompt_projection", width, width * NUM_SOFT_PROMPTS, "ReLU")
    backbone = CdeBackbone(
        checkpoint,
        second,
        FirstStage(first, mlp, _max_seq_length(checkpoint)),
        is_nomic=config["model_type"] == "nomic_bert",
        # The constant that the prompt projection makes of a vector of ones.
        soft_prompts_LD=prompts(torch.ones(1, width, device=device)).view(NUM_SOFT_PROMPTS, width),
        output_projection=read_head("second_stage_model.output_projection", width, width, "ReLU"),
    )
    if surplus := sorted(set(checkpoint.tensors) - tensors.names.keys()):
        raise ModelError(
            "a CDE checkpoint must hold the tensors of its config.json and no others, got "
            f"{', '.join(surplus[:_MOST_NAMED])}; the file does not fit its config.json"
        )
    return backbone


def _max_seq_length(checkpoint: Checkpoint) -> int:
    return checkpoint.integer("max_seq_length", default=512)


FIRST_STAGE: Final = "first_stage_model.embedder."
SECOND_STAGE: Final = "second_stage_model.backbone."
_MOST_NAMED: Final = 3
"""Tensors named in a refusal."""

_REQUIRED: Final[Mapping[str, tuple[Any, ...]]] = {
    "autoregressive_backbone": (False, None),
    "dataset_backbone": (None,),
    "embedding_output_dim": (None,),
    "limit_layers": (None,),
    "limit_layers_first_stage": (None,),
    "transductive_sequence_dropout_prob": (0.0, None),
    "transductive_tie_token_embeddings": (False, None),
    "transductive_tokens_per_document": (1, None),
    "pooling_strategy": ("mean", None),
    "biencoder_pooling_strategy": ("mean", None),
    "pool_ignore_contextual_tokens": (True, None),
    "output_projection_residual": (False, None),
}
"""Settings of which only what is published, or none, is read here."""

_PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "nomic-bert-2048": {
            "model_type": "nomic_bert",
            "activation_function": "swiglu",
            "layer_norm_epsilon": 1e-12,
            "n_embd": 768,
            "n_head": 12,
            "n_inner": 3072,
            "n_layer": 12,
            "n_positions": 2048,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "type_vocab_size": 2,
            "vocab_size": 30528,
        },
        "ModernBERT-base": {
            "model_type": "modernbert",
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "hidden_activation": "gelu",
            "hidden_size": 768,
            "intermediate_size": 1152,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "vocab_size": 50368,
        },
    }
)
"""Sizes of the backbones of cde-small-v1 and cde-small-v2, as their authors publish them."""


def _stage(checkpoint: Checkpoint, prefix: str, config: Mapping[str, Any]) -> Checkpoint:
    """Return a stage's backbone as a checkpoint."""
    key = fingerprint(
        kind="cde-stage",
        checkpoint=checkpoint.fingerprint,
        stage=prefix,
        config=dict(sorted(config.items())),
    )
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    return replace(checkpoint, config=config, tensors=tensors, fingerprint=key)


def _backbone_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the configuration of the model that both backbones are made like."""
    name: Any = checkpoint.config.get("embedder")
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"embedder of a CDE model must name the model its backbone is made like, got {name!r}; "
            "fetch it again"
        )
    last = name.rstrip("/").rpartition("/")[2]
    own = checkpoint.folder / f"{last}.json"
    if own.is_file():
        config: Mapping[str, Any] = read_json(own)
    elif last in _PUBLISHED:
        config = _PUBLISHED[last]
    else:
        raise ModelError(
            f"the model that a CDE checkpoint is made like must be one of {', '.join(_PUBLISHED)}, or have "
            f"its configuration beside the weights, got {name!r} and none; save its config.json as "
            f"{last}.json in the checkpoint's folder"
        )
    if config.get("model_type") not in _READERS:
        raise ModelError(
            f"the backbone of a CDE model must be one of {', '.join(_READERS)}, got "
            f"{config.get('model_type')!r} for {name}; choose another model"
        )
    return config
