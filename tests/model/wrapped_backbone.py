"""A backbone that answers as another one; a test overrides what it observes or breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
from cairn.pipeline.model.engine.backbone import Backbone


class WrappedBackbone(Backbone):
    def __init__(self, backbone: Backbone) -> None:
        self.__dict__ |= vars(backbone)
        self.wrapped = backbone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    @property
    def token_embeddings(self) -> np.ndarray:
        return self.wrapped.token_embeddings

    def hidden_states(self, ids_BT, lengths_B, context_CD=None, temperature=1.0):
        return self.wrapped.hidden_states(ids_BT, lengths_B, context_CD, temperature)
