"""CDE's two stages from one published checkpoint: M1 embeds context documents, M2 reads them before a text.

    M1   text ─▶ backbone ─▶ mean ─▶ Linear · GELU · Linear ─▶ a context vector, not normalised
    M2   [J context vectors][8 soft prompts][text] ─▶ backbone ─▶ mean over the text
                                                            ─▶ Linear · ReLU · Linear ─▶ an embedding

The checkpoints are cde-small-v1 and cde-small-v2.

The soft prompts are one constant, the prompt projection of a vector of ones. As in the public code, text
passes M2's own embedding layer twice and the lead once: ModernBERT norms its text twice, NomicBERT adds token
type 0 twice.

Positions differ by version. v1 (NomicBERT, ``disable_transductive_rotary_embedding``): context vectors have
none, so their order does not matter; soft prompts and text stand where a whole context of J leaves them, from
position J on, however many vectors there are. v2 (ModernBERT): the setting has no effect; positions count
from the first context vector on, so order and number matter, and local layers show a text only the end of its
lead.

Fewer than J context vectors are read as they are, or filled up to J with null tokens where the checkpoint has
one (trained with sequence dropout); so without any context a text stands behind J null tokens, else behind
the soft prompts alone.

The published sources disagree on two points, so both are settings of config.json, off unless it says
otherwise: a residual around the output projection (``output_projection_residual``, a name of ours) and a mean
over lead and text (``pool_ignore_contextual_tokens`` = false). ``pool_ignore_instruction_tokens`` is a matter
of the layout, as for every model.

Public copies of v1's backbone differ further, in how often token type 0 is added and in what its rotation
counts; here the type is added at each pass through the embedding layer, as the published inference code does,
and rotation counts positions. Neither version has been compared with vectors of its published weights.

Source: Morris & Rush 2024 (CDE), §4.2 and §10.4, and the public checkpoints. Differs: one token per context
document; no decoders as M2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.pattern import Batch
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import AnyLinear, WeightReader
from cairn.pipeline.model.families.cde_checkpoint import StagedCheckpoint
from cairn.pipeline.model.families.modernbert import read_modernbert
from cairn.pipeline.model.families.nomic_bert import read_nomic_bert
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

NUM_SOFT_PROMPTS: Final = 8
"""Fixed in the published code; no setting names it."""

_NULL: Final = "second_stage_model.sequence_dropout_null_embedding"

_READERS: Final[Mapping[str, Callable[..., Transformer]]] = {
    "modernbert": read_modernbert,
    "nomic_bert": read_nomic_bert,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """Two projections with an activation between, in float32: it sees pooled vectors only."""

    first: AnyLinear
    second: AnyLinear
    activate: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        inner = self.activate(F.linear(x_ND, self.first.weight, self.first.bias))
        return F.linear(inner, self.second.weight, self.second.bias)


class _Stage:
    """What both stages take over from their backbone."""

    def __init__(self, backbone: Transformer, max_positions: int, embedding_dim: int) -> None:
        self._backbone = backbone
        self.tokenizer: Tokenizer = backbone.tokenizer
        self.cls_id = backbone.cls_id
        self.landmark_id = backbone.landmark_id
        self.pad_id = backbone.pad_id
        self.weights_fingerprint = backbone.weights_fingerprint
        self.config = backbone.config
        self.own_tensors = backbone.own_tensors
        self.dtype = backbone.dtype
        self.device = backbone.device
        self.model_dim = backbone.model_dim
        self.embedding_dim = embedding_dim
        self.max_context: int | None = None
        self.max_positions = max_positions

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self._backbone.token_embeddings


class FirstStage(_Stage):
    """M1: implements :class:`cairn.pipeline.model.engine.backbone.Backbone`; it reads no context itself."""

    def __init__(self, backbone: Transformer, mlp: _Head, max_seq_length: int) -> None:
        super().__init__(
            backbone, min(max_seq_length, backbone.max_positions), int(mlp.second.weight.shape[0])
        )
        self._mlp = mlp
        self.context_dim = backbone.context_dim

    @property
    def first_stage(self) -> FirstStage:
        """Return itself."""
        return self

    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the protocol."""
        assert context_CD is None, "the first stage reads no context"
        return self._backbone.hidden_states(ids_BT, lengths_B, None, temperature)

    @torch.inference_mode()
    def project(self, pooled_MD: Float32[torch.Tensor, "M D"]) -> Float32[torch.Tensor, "M E"]:
        """Pass pooled states through the stage's MLP."""
        return self._mlp(pooled_MD)


class CdeBackbone(_Stage):
    """M2 with its M1: implements :class:`cairn.pipeline.model.engine.backbone.Backbone`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backbone: Transformer,
        first_stage: FirstStage,
        *,
        is_nomic: bool,
        soft_prompts_LD: torch.Tensor,
        output_projection: _Head,
        null_D: torch.Tensor | None,
    ) -> None:
        context_size = checkpoint.integer("transductive_corpus_size")
        num_lead = context_size + len(soft_prompts_LD)
        room = backbone.max_positions - num_lead
        if room < 1:
            raise ModelError(
                f"the backbone of a CDE model must have more positions than the {num_lead} vectors "
                "before a text, "
                f"got {backbone.max_positions}; config.json does not fit the model"
            )
        super().__init__(
            backbone, min(_max_seq_length(checkpoint), room), int(output_projection.second.weight.shape[0])
        )
        config = checkpoint.config
        self.first_stage = first_stage
        self.max_context = self._context_size = context_size
        self.context_dim = first_stage.embedding_dim
        self._pools_lead = not config.get("pool_ignore_contextual_tokens", True)
        self._has_residual = bool(config.get("output_projection_residual", False))
        self._is_nomic = is_nomic
        self._is_placed = not (is_nomic and config.get("disable_transductive_rotary_embedding", True))
        self._soft_prompts_LD = soft_prompts_LD
        self._output_projection = output_projection
        self._type_D = backbone.embed_context(np.zeros((1, backbone.model_dim), np.float32))
        self._null_D = null_D
        if self.context_dim != self.model_dim:
            raise ModelError(
                f"the stages of a CDE model must have one width, got {self.context_dim} and "
                f"{self.model_dim}; config.json does not fit"
            )
        if self._has_residual and self.embedding_dim != self.model_dim:
            raise ModelError(
                "output_projection_residual must be off where embedding_output_dim differs from the "
                f"model's {self.model_dim}, "
                f"got {self.embedding_dim}; set it to false"
            )
        if self._pools_lead and config.get("pool_ignore_instruction_tokens", False):
            raise ModelError(
                "pool_ignore_contextual_tokens of a CDE model must be true where "
                "pool_ignore_instruction_tokens is, got false; "
                "set both to false"
            )

    @torch.inference_mode()
    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the protocol.

        Where lead and text are pooled together, each state is moved so that the mean over a row is the mean
        over its lead and text.
        """
        if ids_BT.shape[1] > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} tokens, got {ids_BT.shape[1]}; choose a "
                "smaller window"
            )
        context = self._context(context_CD)
        lead_LD = torch.cat([context, self._soft_prompts_LD]) + self._type_D
        text_BTD = self._backbone.embed_tokens(ids_BT)
        text_BTD = text_BTD + self._type_D if self._is_nomic else self._backbone.norm_embeddings(text_BTD)
        x_BSD = torch.cat([lead_LD.expand(len(text_BTD), -1, -1), text_BTD], dim=1)
        place = {
            "num_lead": len(lead_LD),
            "num_unplaced": 0 if self._is_placed else len(context),
            "first_position": 0 if self._is_placed else self._context_size,
        }
        if not self._pools_lead:
            return self._backbone.encode_embedded(x_BSD, lengths_B, **place, temperature=temperature)
        batch = Batch(lengths_B=lengths_B, num_tokens=ids_BT.shape[1], **place)
        return _mixed(self._backbone.encode_with_lead(x_BSD, batch, temperature), lengths_B, len(lead_LD))

    @torch.inference_mode()
    def project(self, pooled_MD: Float32[torch.Tensor, "M D"]) -> Float32[torch.Tensor, "M E"]:
        """Pass pooled states through the output projection."""
        projected_ME = self._output_projection(pooled_MD)
        return projected_ME + pooled_MD if self._has_residual else projected_ME

    def _context(self, context_CD: Float32[np.ndarray, "C D"] | None) -> Float32[torch.Tensor, "_ _"]:
        """Return the vectors before the soft prompts, filled up with null tokens where there is one."""
        given = torch.zeros((0, self.model_dim), device=self.device)
        if context_CD is not None:
            if context_CD.shape[1] != self.context_dim or len(context_CD) > self._context_size:
                raise ConfigError(
                    f"the context must be at most {self._context_size} rows of {self.context_dim} "
                    f"numbers, got shape {context_CD.shape}; "
                    "draw it with this model, and with fewer documents"
                )
            given = torch.from_numpy(context_CD).to(self.device)
        if self._null_D is None:
            return given
        return torch.cat([given, self._null_D.expand(self._context_size - len(given), -1)])


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
    staged = StagedCheckpoint(checkpoint, num_layers)
    first, second = (
        run_on(_read_backbone(staged, stage, dtype, device))
        for stage in (staged.first_stage, staged.second_stage)
    )
    backbone = CdeBackbone(
        checkpoint,
        second,
        FirstStage(first, _read_mlp(staged, first.model_dim, device), _max_seq_length(checkpoint)),
        is_nomic=staged.second_stage.config["model_type"] == "nomic_bert",
        soft_prompts_LD=_read_soft_prompts(staged, second.model_dim, device),
        output_projection=_read_output_projection(staged, checkpoint, second.model_dim, device),
        null_D=_read_null(staged, checkpoint, second.model_dim, device),
    )
    staged.require_whole()
    return backbone


def _max_seq_length(checkpoint: Checkpoint) -> int:
    return checkpoint.integer("max_seq_length", default=512)


def _read_backbone(
    staged: StagedCheckpoint, stage: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Transformer:
    return _READERS[stage.config["model_type"]](staged.watched(stage), dtype=dtype, device=device)


def _read_head(
    staged: StagedCheckpoint,
    prefix: str,
    widths: tuple[int, int, int],
    activate: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> _Head:
    """Read two projections, numbered 0 and 2 as the modules around their activation are."""
    reader = WeightReader(staged.tensors(f"{prefix}."), f"{prefix}.0.weight", device)
    source, inner, target = widths
    return _Head(
        first=reader.linear(f"{prefix}.0", (inner, source), torch.float32, bias=True),
        second=reader.linear(f"{prefix}.2", (target, inner), torch.float32, bias=True),
        activate=activate,
    )


def _read_mlp(staged: StagedCheckpoint, width: int, device: torch.device) -> _Head:
    return _read_head(staged, "first_stage_model.mlp", (width, width, width), F.gelu, device)


def _read_output_projection(
    staged: StagedCheckpoint, checkpoint: Checkpoint, width: int, device: torch.device
) -> _Head:
    output_dim = checkpoint.integer("embedding_output_dim", default=width)
    return _read_head(
        staged, "second_stage_model.output_projection", (width, width, output_dim), F.relu, device
    )


def _read_soft_prompts(staged: StagedCheckpoint, width: int, device: torch.device) -> torch.Tensor:
    """Return the constant that the prompt projection makes of a vector of ones."""
    head = _read_head(
        staged,
        "second_stage_model.prompt_projection",
        (width, width, width * NUM_SOFT_PROMPTS),
        F.relu,
        device,
    )
    return head(torch.ones(width, device=device)).view(NUM_SOFT_PROMPTS, width)


def _read_null(
    staged: StagedCheckpoint, checkpoint: Checkpoint, width: int, device: torch.device
) -> torch.Tensor | None:
    """Return the null token, which exists exactly where the model was trained with sequence dropout."""
    if not checkpoint.config.get("transductive_sequence_dropout_prob"):
        return None
    return WeightReader(staged.tensors(_NULL), _NULL, device).read(_NULL, (width,), torch.float32)


def _mixed(states_BSD: torch.Tensor, lengths_B: Int64[np.ndarray, " B"], num_lead: int) -> torch.Tensor:
    """Return the text's states, each with its row's lead mixed in.

    Their mean over the row is the mean over lead and text.
    """
    lead_BD = states_BSD[:, :num_lead].float().sum(dim=1)
    lengths = torch.from_numpy(lengths_B).to(states_BSD.device)[:, None, None]
    return (states_BSD[:, num_lead:].float() * lengths + lead_BD[:, None]) / (lengths + num_lead)
