"""A table of vectors, one a token: Sentence-Transformers' StaticEmbedding and Model2Vec's folders.

    ids ─▶ rows of the table                pooled by their mean, whatever stands around them

A token's state is its row, so token vectors are had, too. Rows of the pipeline end in a landmark, which such
a model does not have: it gets a vector so short that it moves no mean, and stands alone where a text has no
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.backbone import Backbone, ContextRows, Ids, Lengths
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.model_types import LACKED_BY_TRANSFORMERS
from jaxtyping import Float, Float32

LANDMARK_SCALE: Final = 1e-6
"""Of the table's mean vector: below what float32 keeps of a mean."""
MAX_POSITIONS: Final = 1 << 16


class StaticBackbone(Backbone):
    """A table of token vectors as a backbone."""

    lacks = (*LACKED_BY_TRANSFORMERS, "attention", "pooling")

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device) -> None:
        if checkpoint.steps:
            raise ModelError(
                f"a model of static vectors must end in them, got {checkpoint.steps[0].kind}; choose another "
                "model"
            )
        table_VD = _table(checkpoint.tensors).to(device)
        landmark_D = LANDMARK_SCALE * table_VD.mean(dim=0)
        self._table_XD = torch.cat([table_VD, landmark_D[None]])
        super().__init__(checkpoint, torch.float32, device)
        self.landmark_id = len(table_VD)
        self.model_dim = self.context_dim = int(table_VD.shape[1])
        self.max_positions = MAX_POSITIONS
        self.num_embeddings = len(table_VD)

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the table."""
        return self._table_XD[:-1].cpu().numpy()

    def hidden_states(
        self,
        ids_BT: Ids,
        lengths_B: Lengths,  # noqa: ARG002 - rows stand alone
        context_CD: ContextRows = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return each token's vector; see the base."""
        assert (context_CD, temperature) == (None, 1.0), "settings were checked"
        return F.embedding(torch.from_numpy(ids_BT).to(self.device), self._table_XD)


def _table(tensors: Mapping[str, torch.Tensor]) -> Float32[torch.Tensor, "V D"]:
    """Return the vector of every token id; Model2Vec may map ids to fewer rows, and weigh them."""
    name = "embedding.weight" if "embedding.weight" in tensors else "embeddings"
    if name not in tensors or tensors[name].dim() != 2:
        raise ModelError(
            "the weights of a model of static vectors must hold embedding.weight or embeddings, got "
            f"{', '.join(sorted(tensors)) or 'none'}; fetch the model again"
        )
    table_VD = require_floats(name, tensors[name]).float()
    if name == "embeddings":
        if "mapping" in tensors:
            table_VD = table_VD[tensors["mapping"].long()]
        if "weights" in tensors:
            table_VD = table_VD * tensors["weights"].float()[:, None]
    return table_VD
