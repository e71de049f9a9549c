"""A batch of windows under landmark attention: packed rows that see their window's landmarks and the context.

    rows of one window     [CLS] z1 [LMK] · [CLS] z2 [LMK] · …      positions restart in every row
    tokens of the batch    all rows laid end to end without padding; a window never leaves its batch

With rotary positions queries and landmarks are turned by their place in their own row, context not at all.
Local layers keep to their radius inside a row; landmarks and context show in every layer, each behind the
gates of that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from cairn.pipeline.model.engine.attention import attend
from cairn.pipeline.model.engine.landmark_attention import Memory, cut_into_blocks, landmark_attention
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Batch, PassSettings
from jaxtyping import Float, Float32, Int64

SCORES_PER_STEP: Final = 1 << 19
"""Scores of all heads made at a time on a CPU; keys are gathered beside them, and both stay in the cache.

Twice as many cost 10 % more.
"""

CUDA_SCORES_PER_STEP: Final = 1 << 28
"""A GPU's fused kernel stores no scores; this bounds the keys gathered for a step to a few gigabytes."""


class LandmarkWindows(Packed):
    """Implements :class:`cairn.pipeline.model.engine.pattern.Pattern` for rows without a lead.

    ``windows`` numbers each row's window. Gates are one a layer and head, towards landmarks and context.
    """

    def __init__(
        self,
        batch: Batch,
        windows_B: Int64[np.ndarray, " B"],
        settings: PassSettings,
        *,
        landmark_gates_LH: Float32[torch.Tensor, "layers H"],
        context_gates_LH: Float32[torch.Tensor, "layers H"],
        memory: Sequence[Memory] | None,
    ) -> None:
        assert batch.num_lead == 0, "context comes to landmark attention as a memory, not as a lead"
        super().__init__(batch, settings)
        self._landmark_gates_LH = landmark_gates_LH
        self._context_gates_LH = context_gates_LH
        self._memory = memory
        self._blocks = cut_into_blocks(
            batch.lengths_B,
            windows_B,
            scores_per_step=(SCORES_PER_STEP if settings.device.type == "cpu" else CUDA_SCORES_PER_STEP)
            // settings.shape.num_heads,
            num_context=0 if memory is None else memory[0].key_GCd.shape[1],
            local_radius=settings.shape.local_radius,
            device=settings.device,
        )

    def attend(
        self,
        padded_NPd: Float[torch.Tensor, "N P d"],
        layer: int,
        /,
        *,
        is_local: bool,
        drop_lead: bool,  # noqa: ARG002 - no lead
    ) -> torch.Tensor:
        """See :class:`cairn.pipeline.model.engine.pattern.Pattern`."""
        shape = self._settings.shape
        query, key, value = padded_NPd.split(
            [shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads], dim=1
        )
        mixed_NHd = landmark_attention(
            query,
            key,
            value,
            self._blocks,
            mix=self._mix_rows,
            gates_H=self._landmark_gates_LH[layer],
            memory=None if self._memory is None else self._memory[layer],
            context_gates_H=self._context_gates_LH[layer],
            is_local=is_local,
        )
        return mixed_NHd.flatten(1)

    def _mix_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return attend(query, key, value, bias, self._settings.workspace, self._settings.temperature)
