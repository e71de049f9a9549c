"""Landmarks that know their document, its title and the corpus: what is mixed in after the transformer.

    yᵢ = xᵢ + pᵢ t + qᵢ m + Σₕ rₕᵢ Σⱼ aₕᵢⱼ xⱼ + Σₕ sₕᵢ Σⱼ bₕᵢⱼ cⱼ          a landmark of a document
    y  = x + Σₕ sₕ Σⱼ bₕⱼ cⱼ                                              a query, with heads of its own

x are a document's chunk embeddings, each made in its own chunk; t the embedding of its title; m the mean of
the x; c the context, embedded once by the first stage (CDE §4.2); all of unit length. a is attention among a
document's landmarks, weaker with distance, b attention to the context. The gates p, q, r, s are trained and
depend on how close xᵢ is to m and t and on the document's length.

Values are the embeddings themselves: only what is mixed, and how much, is learned. So a vector never leaves
the space of the base model, and a mixer whose gates are 0 gives the base model's own vectors. Landmarks
attend within stretches of :data:`STRETCH_LANDMARKS`, so the cost is linear in a document's length. A last
matrix turns the space so that its first dimensions say most (Matryoshka: Kusupati et al. 2022; m³BERT §2.1).

    N documents    M landmarks    S stretches    L landmarks of the longest
    C context documents    D width    H heads    d of a head
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as PREFIX
from cairn.pipeline.ragged import places_in_groups
from jaxtyping import Bool, Float, Float32, Int64
from torch import nn
from torch.nn import functional

STRETCH_LANDMARKS: Final = 256
"""Landmarks that attend to one another: 16,384 tokens at the default interval."""
BATCH_LANDMARKS: Final = 4_096
NUM_FEATURES: Final = 4
MEAN_COSINE, TITLE_COSINE = 0.5, 0.3
"""About what landmarks have with their document's mean and title: features count from there."""
HIDDEN: Final = -1e4
"""A logit that no softmax lets through."""


class MixingHeads(nn.Module):
    """Heads that choose among embeddings: queries and keys are learned, values are the embeddings."""

    def __init__(self, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, num_heads * head_dim)
        self.key = nn.Linear(width, num_heads * head_dim)
        self.gate = nn.Parameter(torch.zeros(num_heads))
        self.gate_slope = nn.Parameter(torch.zeros(num_heads, NUM_FEATURES))

    def logits(
        self, x_SLD: Float[torch.Tensor, "S L D"], keys_sKD: Float[torch.Tensor, "s K D"]
    ) -> Float[torch.Tensor, "S H L K"]:
        """Return what each head thinks of each key; keys of one row (s = 1) serve all rows."""
        query_SHLd = self.query(x_SLD).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
        key_sHKd = self.key(keys_sKD).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
        return query_SHLd @ key_sHKd.transpose(-1, -2)

    def add(
        self,
        features_SLF: Float[torch.Tensor, "S L F"],
        weights_SHLK: Float[torch.Tensor, "S H L K"],
        values_KD: Float[torch.Tensor, "*s K D"],
    ) -> Float[torch.Tensor, "S L D"]:
        """Return what all heads add, each by its gate."""
        gates_SHL = (self.gate + features_SLF @ self.gate_slope.T).transpose(-1, -2)
        return torch.einsum("shl,shlk->slk", gates_SHL, weights_SHLK) @ values_KD


class LandmarkMixer(nn.Module):
    """The trained map; ``width`` is that of chunk embeddings.

    Embeddings that come in need not be of unit length, those that come out are.
    """

    def __init__(self, width: int, num_heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        self.width = width
        self.document = MixingHeads(width, num_heads, head_dim)
        self.context = MixingHeads(width, num_heads, head_dim)
        self.query_context = MixingHeads(width, num_heads, head_dim)
        self.distance = nn.Parameter(torch.linspace(-2.0, 1.0, num_heads))
        self.title_gate, self.mean_gate = (nn.Parameter(torch.zeros(())) for _ in range(2))
        self.title_slope, self.mean_slope = (nn.Parameter(torch.zeros(NUM_FEATURES)) for _ in range(2))
        self.turn = nn.Parameter(torch.eye(width))

    @torch.inference_mode()
    def mix_documents(
        self,
        chunk_embeddings_MD: Float32[np.ndarray, "M D"],
        chunk_offsets: Int64[np.ndarray, " N1"],
        title_embeddings_ND: Float32[np.ndarray, "N D"] | None,
        context_CD: Float32[np.ndarray, "C D"] | None,
    ) -> Float32[np.ndarray, "M D"]:
        """Mix the landmarks of N documents; document i owns ``chunk_offsets[i]:chunk_offsets[i + 1]``.

        A title of zeros is none. A landmark's result depends on its own document and the context alone, not
        on what is encoded beside.
        """
        if not len(chunk_embeddings_MD):
            return chunk_embeddings_MD
        device = self.turn.device
        x_MD, counts_N = self._units(chunk_embeddings_MD), np.diff(chunk_offsets)
        owner_M = torch.from_numpy(np.repeat(np.arange(len(counts_N)), counts_N)).to(device)
        mean_ND = functional.normalize(
            torch.zeros(len(counts_N), self.width, device=device).index_add_(0, owner_M, x_MD), dim=-1
        )
        title_ND = (
            torch.zeros_like(mean_ND) if title_embeddings_ND is None else self._units(title_embeddings_ND)
        )
        context = None if context_CD is None else self._units(context_CD)
        mixed_MD = torch.empty_like(x_MD)
        for first_S, length_S, document_S in _batches(counts_N, chunk_offsets):
            place_L = np.arange(length_S.max())
            is_landmark_SL = torch.from_numpy(place_L < length_S[:, None]).to(device)
            source_SL = torch.from_numpy(np.minimum(first_S[:, None] + place_L, len(x_MD) - 1)).to(device)
            num_S = torch.from_numpy(counts_N[document_S].astype(np.float32)).to(device)
            of_document = torch.from_numpy(document_S).to(device)
            x_SLD = x_MD[source_SL] * is_landmark_SL[..., None]
            mixed_SLD = self._mix(
                x_SLD, is_landmark_SL, mean_ND[of_document], title_ND[of_document], num_S, context
            )
            mixed_MD[source_SL[is_landmark_SL]] = mixed_SLD[is_landmark_SL]
        return mixed_MD.cpu().numpy()

    @torch.inference_mode()
    def mix_queries(
        self, embeddings_QD: Float32[np.ndarray, "Q D"], context_CD: Float32[np.ndarray, "C D"] | None
    ) -> Float32[np.ndarray, "Q D"]:
        """Mix queries, one embedding each."""
        x_QD = self._units(embeddings_QD)
        if context_CD is not None:
            # A document of one landmark, its own mean, without a title.
            features_F = x_QD.new_tensor([1 - MEAN_COSINE, -TITLE_COSINE, 0.0, 0.0])
            added_Q1D = self._of_context(
                self.query_context,
                x_QD[:, None],
                features_F.expand(len(x_QD), 1, -1),
                self._units(context_CD),
            )
            x_QD = x_QD + added_Q1D[:, 0]
        return self._turned(x_QD).cpu().numpy()

    def _mix(
        self,
        x_SLD: Float[torch.Tensor, "S L D"],
        is_landmark_SL: Bool[torch.Tensor, "S L"],
        mean_SD: Float[torch.Tensor, "S D"],
        title_SD: Float[torch.Tensor, "S D"],
        num_landmarks_S: Float[torch.Tensor, " S"],
        context_CD: Float[torch.Tensor, "C D"] | None,
    ) -> Float[torch.Tensor, "S L D"]:
        """Mix S rows of neighbouring landmarks, padded to L, of unit length; padded places hold no meaning.

        The mean, the title (or zeros) and the number of landmarks are those of each row's document.
        """
        to_mean_SL, to_title_SL = (torch.einsum("sld,sd->sl", x_SLD, other) for other in (mean_SD, title_SD))
        length_SL = (num_landmarks_S.log() / 5)[:, None].expand_as(to_mean_SL)
        has_title_SL = title_SD.norm(dim=-1)[:, None].expand_as(to_mean_SL)
        features_SLF = torch.stack(
            [to_mean_SL - MEAN_COSINE, to_title_SL - TITLE_COSINE, length_SL, has_title_SL], dim=-1
        )
        title_gate_SL = self.title_gate + features_SLF @ self.title_slope
        is_long_S1 = (num_landmarks_S > 1).to(x_SLD.dtype)[:, None]
        mean_gate_SL = (self.mean_gate + features_SLF @ self.mean_slope) * is_long_S1
        y_SLD = (
            x_SLD + title_gate_SL[..., None] * title_SD[:, None] + mean_gate_SL[..., None] * mean_SD[:, None]
        )
        if x_SLD.shape[1] > 1:
            y_SLD = y_SLD + self._of_document(x_SLD, is_landmark_SL, features_SLF)
        if context_CD is not None:
            y_SLD = y_SLD + self._of_context(self.context, x_SLD, features_SLF, context_CD)
        return self._turned(y_SLD)

    def _of_document(
        self,
        x_SLD: Float[torch.Tensor, "S L D"],
        is_landmark_SL: Bool[torch.Tensor, "S L"],
        features_SLF: Float[torch.Tensor, "S L F"],
    ) -> Float[torch.Tensor, "S L D"]:
        place_L = torch.arange(x_SLD.shape[1], device=x_SLD.device)
        apart_LL = (place_L[:, None] - place_L[None]).abs()
        penalty_HLL = self.distance.exp()[:, None, None] * apart_LL.to(x_SLD.dtype).log1p()
        logits_SHLL = self.document.logits(x_SLD, x_SLD) - penalty_HLL
        hidden_SHLL = (apart_LL == 0)[None, None] | ~is_landmark_SL[:, None, None]
        # Where nothing is left to see, as for the only landmark of a row, nothing is added.
        weights_SHLL = logits_SHLL.masked_fill(hidden_SHLL, HIDDEN).softmax(-1).masked_fill(hidden_SHLL, 0.0)
        return self.document.add(features_SLF, weights_SHLL, x_SLD)

    @staticmethod
    def _of_context(
        heads: MixingHeads,
        x_SLD: Float[torch.Tensor, "S L D"],
        features_SLF: Float[torch.Tensor, "S L F"],
        context_CD: Float[torch.Tensor, "C D"],
    ) -> Float[torch.Tensor, "S L D"]:
        return heads.add(features_SLF, heads.logits(x_SLD, context_CD[None]).softmax(-1), context_CD)

    def _turned(self, y: Float[torch.Tensor, "*rows D"]) -> Float[torch.Tensor, "*rows D"]:
        return functional.normalize(y @ self.turn, dim=-1)

    def _units(self, embeddings_ND: Float32[np.ndarray, "N D"]) -> Float32[torch.Tensor, "N D"]:
        return functional.normalize(torch.from_numpy(embeddings_ND).to(self.turn.device), dim=-1)


def _batches(
    counts_N: Int64[np.ndarray, " N"], chunk_offsets: Int64[np.ndarray, " N1"]
) -> list[tuple[Int64[np.ndarray, " S"], Int64[np.ndarray, " S"], Int64[np.ndarray, " S"]]]:
    """Batch stretches of like length: the first landmark, the length and the document of each."""
    num_stretches_N = -(-counts_N // STRETCH_LANDMARKS)
    document_S = np.repeat(np.arange(len(counts_N)), num_stretches_N)
    number_S = places_in_groups(num_stretches_N)
    # Equal stretches, so that the last is not left with a few landmarks.
    starts_S = number_S * counts_N[document_S] // num_stretches_N[document_S]
    ends_S = (number_S + 1) * counts_N[document_S] // num_stretches_N[document_S]
    first_S, length_S = chunk_offsets[document_S] + starts_S, ends_S - starts_S
    order = np.argsort(length_S, kind="stable")
    batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    start = 0
    while start < len(order):
        # Lengths ascend, so the last of a batch is its longest.
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * length_S[order[stop]] <= BATCH_LANDMARKS:
            stop += 1
        rows = order[start:stop]
        batches.append((first_S[rows], length_S[rows], document_S[rows]))
        start = stop
    return batches


def mixer_of(backbone: Backbone) -> LandmarkMixer | None:
    """Return a backbone's mixer, None where it has none; a misfit raises :class:`ModelError`."""
    tensors, width = backbone.own_tensors, backbone.embedding_dim
    own = {name.removeprefix(PREFIX): tensors[name] for name in tensors if name.startswith(PREFIX)}
    if not own:
        return None
    gates, query = own.get("document.gate"), own.get("document.query.weight")
    if (
        gates is None
        or query is None
        or (gates.ndim, query.ndim) != (1, 2)
        or not len(gates)
        or len(query) % len(gates)
    ):
        raise ModelError(
            f"{PREFIX}document of the model must hold gates and query weights that fit, got others; "
            "train the mixer again"
        )
    mixer = LandmarkMixer(width, num_heads=len(gates), head_dim=len(query) // len(gates))
    expected = {name: tuple(tensor.shape) for name, tensor in mixer.state_dict().items()}
    if {name: tuple(tensor.shape) for name, tensor in own.items()} != expected:
        raise ModelError(
            f"the model's {PREFIX}* must be the tensors of a mixer of embeddings {width} wide, got "
            "others; train it for this model"
        )
    for name, tensor in own.items():
        if not bool(require_floats(f"{PREFIX}{name}", tensor).isfinite().all()):
            raise ModelError(f"{PREFIX}{name} must be finite, got NaN or infinity; train the mixer again")
    mixer.load_state_dict({name: tensor.float() for name, tensor in own.items()})
    return mixer.to(backbone.device).eval().requires_grad_(False)
