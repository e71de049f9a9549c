"""The one engine that runs every backbone: layers of attention and feed-forward, for inference.

    ids ─▶ embedding ─▶ [lead][text] ─▶ norm ─▶ layer ─▶ … ─▶ layer ─▶ (norm) ─▶ hidden states of the text
                           ▲                      ▲
                 context, soft prompt         pattern: who sees whom

A family module reads its published configuration and weights into ``Layer`` s and an ``Embedding``. What
differs between families is data here: where norms stand, which norm, rotary or absolute positions, local
layers, shared key and value heads, plain or gated feed-forward. Same mathematics as the published models,
exact to 1e-5 in fp32.

After the last layer that can show the lead to the text, only the text goes on. No dropout, no token types but
0. What a checkpoint holds beside its transformer is read above the engine, from ``own_tensors``.

    B rows   S vectors of a row, lead and text   T text tokens   N vectors of a batch   M of its texts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.in_place import InPlaceOperations
from cairn.pipeline.model.engine.layer import Layer, run_layer
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Batch, PassSettings, Pattern, Shape
from cairn.pipeline.model.engine.rectangle import Rectangle
from cairn.pipeline.model.engine.rotary import RotaryTable
from cairn.pipeline.model.engine.weights import Norm
from cairn.pipeline.model.engine.workspace import Workspace
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Float, Float32, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The input tables in float32.

    ``token_type`` is added to every vector, ``positions`` to text only, ``norm`` is applied to all.
    """

    tokens_VD: torch.Tensor
    positions_PD: torch.Tensor | None = None
    token_type_D: torch.Tensor | None = None
    norm: Norm | None = None

    def look_up(
        self, ids: Int64[torch.Tensor, "*B T"], places: slice | Int64[torch.Tensor, " T"]
    ) -> Float[torch.Tensor, "*B T D"]:
        """Return the vectors of tokens at these positions, with token type 0, before the norm."""
        x = F.embedding(ids, self.tokens_VD)
        if self.positions_PD is not None:
            is_range = isinstance(places, slice)
            x += self.positions_PD[places] if is_range else F.embedding(places, self.positions_PD)
        if self.token_type_D is not None:
            x += self.token_type_D
        return x


class Transformer(Backbone):
    """A backbone of layers, read from a checkpoint by its family's reader."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm: Norm | None,
        shape: Shape,
        rotary: Mapping[bool, RotaryTable],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokenizer = checkpoint.tokenizer
        self.cls_id, self.landmark_id = checkpoint.cls_id, checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.weights_fingerprint = checkpoint.fingerprint
        self.config = checkpoint.config
        self.own_tensors = checkpoint.own_tensors
        self.device = device
        self.dtype = dtype
        self.model_dim = self.context_dim = int(embedding.tokens_VD.shape[1])
        self.max_positions = shape.max_positions
        self.embedding = embedding
        self.layers = list(layers)
        self.num_layers = len(layers)
        self.final_norm = final_norm
        self.shape = shape
        self.rotary = rotary
        self.workspace = Workspace(device)
        # The flash kernels know half precision only.
        is_packed = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.pattern_type: type[Pattern] = Packed if is_packed else Rectangle
        self._last_global = max(
            (index for index, layer in enumerate(layers) if not layer.is_local), default=-1
        )

    def pack(self) -> None:
        """Lay the layers' weights out as this processor multiplies them, one layer after another.

        The plain ones go.
        """
        for index, layer in enumerate(self.layers):
            self.layers[index] = layer.packed()

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self.embedding.tokens_VD.cpu().numpy()

    @torch.inference_mode()
    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        x_BSD = self.embed_tokens(ids_BT)
        num_context = 0
        if context_CD is not None:
            num_context = len(context_CD)
            x_BSD = torch.cat([self.embed_context(context_CD).expand(len(x_BSD), -1, -1), x_BSD], dim=1)
        return self.encode_embedded(
            x_BSD, lengths_B, num_lead=num_context, num_unplaced=num_context, temperature=temperature
        )

    def embed_tokens(self, ids_BT: Int64[np.ndarray, "B T"]) -> Float32[torch.Tensor, "B T D"]:
        """Look tokens up, with position and type, before the embedding norm.

        Raise :class:`ModelError` for a row that is too long.
        """
        num_tokens = ids_BT.shape[1]
        if num_tokens > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} tokens, got {num_tokens}; choose a "
                "smaller window"
            )
        return self.embedding.look_up(torch.from_numpy(ids_BT).to(self.device), slice(num_tokens))

    def embed_context(
        self, context_CD: Float32[np.ndarray, "C D"] | Float[torch.Tensor, "C D"]
    ) -> Float[torch.Tensor, "C D"]:
        """Return context vectors as input embeddings, with token type 0, no position, before the norm."""
        x_CD = torch.as_tensor(context_CD, device=self.device)
        return x_CD if self.embedding.token_type_D is None else x_CD + self.embedding.token_type_D

    def norm_embeddings(self, x_BSD: Float[torch.Tensor, "*B S D"]) -> Float[torch.Tensor, "*B S D"]:
        """Apply the embedding norm, where the family has one."""
        return x_BSD if self.embedding.norm is None else self.embedding.norm(x_BSD)

    def encode_embedded(
        self,
        x_BSD: Float32[torch.Tensor, "B S D"],
        lengths_B: Int64[np.ndarray, " B"],
        *,
        num_lead: int,
        num_unplaced: int,
        first_position: int = 0,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Run the layers over input embeddings and return the states of the text.

        ``num_lead`` vectors stand before every row's text; the first ``num_unplaced`` of them have no
        position, so their order does not matter and local layers do not show them to the text; positions of
        the others and the text count from ``first_position``.
        """
        if num_unplaced and self._last_global < 0:
            raise ModelError(
                "a model that reads context must have a global layer, got local ones only; go on without "
                "context"
            )
        num_positions = first_position + x_BSD.shape[1] - num_unplaced
        if num_positions > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} positions, got {num_positions}; choose a "
                "smaller window"
            )
        batch = Batch(
            lengths_B=lengths_B,
            num_tokens=x_BSD.shape[1] - num_lead,
            num_lead=num_lead,
            num_unplaced=num_unplaced,
            first_position=first_position,
        )
        # A lead with positions is in the windows of local layers too.
        last_read = self._last_global if num_unplaced == num_lead else self.num_layers - 1
        pattern = self.pattern_type(batch, self.pass_settings(temperature))
        return self.encode_pattern(x_BSD, pattern, drop_lead_at=last_read if num_lead else None)

    def pass_settings(self, temperature: float) -> PassSettings:
        """Return what every pattern of this model needs to know."""
        return PassSettings(
            shape=self.shape,
            rotary=self.rotary,
            temperature=temperature,
            workspace=self.workspace,
            device=self.device,
        )

    def encode_pattern(
        self, x_BSD: Float32[torch.Tensor, "B S D"], pattern: Pattern, *, drop_lead_at: int | None = None
    ) -> Float[torch.Tensor, "B T D"]:
        """Run input embeddings through embedding norm, layers and final norm under a pattern of one's own."""
        x_ND = pattern.pack(self.norm_embeddings(x_BSD).to(self.dtype))
        x_ND = self.run_layers(x_ND, pattern, drop_lead_at=drop_lead_at)
        return pattern.unpack(x_ND if self.final_norm is None else self.final_norm(x_ND))

    def run_layers(
        self, x_ND: Float[torch.Tensor, "N D"], pattern: Pattern, *, drop_lead_at: int | None
    ) -> Float[torch.Tensor, "M D"]:
        """Pass tokens through all layers, without the final norm; ``x`` may be overwritten."""
        for index in range(len(self.layers)):
            layer, drop_lead = self.layers[index], index == drop_lead_at
            operations = InPlaceOperations(
                layer, index, pattern, self.shape, self.workspace, drop_lead=drop_lead
            )
            x_ND = run_layer(layer, x_ND, operations, norm_first=self.shape.norm_first)
            if drop_lead:
                pattern = pattern.without_lead()
        return x_ND
