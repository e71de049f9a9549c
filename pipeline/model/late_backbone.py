"""A late-interaction checkpoint as a backbone: its states are projected unit vectors, one a token.

    ids ─▶ transformer ─▶ states ─▶ dense layers ─▶ normalise ─▶ token vectors

A chunk's vector is their mean, so that a query's and a chunk's product is the mean similarity of their
tokens, which nominates what token vectors then judge. Queries have a marker and an expansion.

Source: Khattab & Zaharia 2020 (ColBERT), eq. 1 to 3; differs: [CLS], marker and landmark of a document have
no vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.backbone import Backbone, BackboneOver, ContextRows, Ids, Lengths
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Rectangle
from cairn.pipeline.model.engine.projection import Projection, ProjectionLayer
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.late_interaction import LINEAR, LateInteraction
from jaxtyping import Float, Float32, Int32, Int64
from tokenizers import Tokenizer


class LateBackbone(BackboneOver[Backbone]):
    """A transformer with the projection of its token vectors."""

    def __init__(self, backbone: Backbone, projection: Projection, late: LateInteraction) -> None:
        super().__init__(
            backbone, {"model_dim", "context_dim", "projection", "lacks", "max_context", "own_first_stage"}
        )
        self.model_dim = self.context_dim = projection.output_dim
        self.lacks = (*backbone.lacks, "use_context", "document_context")
        self.late = late
        self.skipped_ids = _known(self.tokenizer, late.skipped)
        self.expansion_id = self._expansion_id()
        self._projection = projection
        if isinstance(backbone, Transformer) and backbone.pattern_type is Packed:
            # Expansion that others do not see stands behind a row's end, where packed rows hold nothing.
            backbone.pattern_type = Rectangle

    def _expansion_id(self) -> int:
        wanted = self.late.expansion_token or "[MASK]"
        found = [self.tokenizer.token_to_id(name) for name in (wanted, "<mask>")]
        return next((token for token in found if token is not None), self.landmark_id)

    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T V"]:
        """Return the tokens' unit vectors; see the base."""
        states_BTD = self._backbone.hidden_states(ids_BT, lengths_B, context_CD, temperature)
        return F.normalize(self._projection(states_BTD.float()), dim=-1)

    def query_rows(
        self, prefix_ids: Sequence[int], texts: Sequence[Int32[np.ndarray, " _"]]
    ) -> tuple[list[list[int]], int]:
        """Return the ids of queries' rows with their marker, cut to their length, and where texts begin."""
        head = [*([] if self.cls_id is None else [self.cls_id]), *prefix_ids]
        most = min(self.late.query_length or self.max_positions, self.max_positions)
        room = most - len(head) - 1
        if room < 1:
            raise ModelError(
                f"the query prefix must leave a text room in the model's {most} tokens of a query, got "
                f"{len(prefix_ids)}; shorten it"
            )
        return [[*head, *ids[:room].tolist(), self.landmark_id] for ids in texts], len(head)

    def query_vectors(self, rows: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, "_ V"]]:
        """Return the vectors of every token of queries, expansion included."""
        lengths_B = np.array([len(row) for row in rows])
        scored_B = np.maximum(lengths_B, self.late.expansion_length)
        ids_BT = np.full((len(rows), int(scored_B.max())), self.expansion_id, np.int64)
        for place, row in enumerate(rows):
            ids_BT[place, : len(row)] = row
        vectors_BTV = self.hidden_states(ids_BT, scored_B if self.late.attends else lengths_B).cpu().numpy()
        return [vectors_TV[:count] for vectors_TV, count in zip(vectors_BTV, scored_B.tolist(), strict=True)]


def _known(tokenizer: Tokenizer, words: Sequence[str]) -> Int64[np.ndarray, " s"]:
    found = [tokenizer.token_to_id(word) for word in words]
    return np.array([token for token in found if token is not None], np.int64)


def linear_of(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Projection:
    """Return Stanford's projection; weights without one raise :class:`ModelError`."""
    if LINEAR not in tensors or tensors[LINEAR].dim() != 2:
        raise ModelError(f"the weights of a ColBERT must hold {LINEAR}, got none; fetch the model again")
    weight = require_floats(LINEAR, tensors[LINEAR]).float().to(device)
    return Projection(layers=(ProjectionLayer(kind="Identity", weight=weight),), output_dim=len(weight))
