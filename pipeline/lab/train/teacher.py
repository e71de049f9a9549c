"""A teacher of any family and width: its vectors of the training texts, laid into the base model's space.

    teacher's vectors ─▶ as many principal axes as the base has dimensions ─▶ the nearest rotation

A rotation changes no score between the teacher's vectors. It is found in closed form, so nothing is trained
beside the model, and a run repeats bit for bit.

Source: vectors of texts as the only target, as in LEAF; the rotation is the orthogonal Procrustes solution
(Schönemann 1966). Differs from LEAF: there a linear map behind the student is trained and kept.

    N pairs    T texts    D width of the base    E width of the teacher
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.pairs import Candidates, TrainingPairs
from cairn.pipeline.lab.train.surrogate import MAX_TOKENS, PairVectors, embed_texts
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.token_vectors.codes import unit
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

FITTED_PAIRS = 8_192
"""Pairs that axes and rotation are found from, at most."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """An encoder of whole texts; a document is read up to 256 tokens at a time."""

    encoder: DocumentEncoder

    @classmethod
    def named(cls, name: str) -> Teacher:
        """Load a model by name or folder, with the settings its folder brings but without a context.

        Raises :class:`ConfigError` where there is none.
        """
        try:
            config = encoder_config({"model": name, "use_context": False})
            backbone = load_backbone(config)
        except ConfigError as error:
            raise ConfigError(f"the teacher cannot be loaded: {error}") from error
        if config.attention == "chunk":
            prefix = backbone.tokenizer.encode(config.document_prefix, add_special_tokens=False).ids
            longest = min(MAX_TOKENS, backbone.max_positions - 2 - len(prefix))
            config = replace(config, landmark_interval=longest, whole_text_tokens=0)
        return cls(DocumentEncoder(config, backbone=backbone))

    def embed(self, pairs: TrainingPairs, progress: ProgressListener) -> PairVectors:
        """Embed both sides of every pair; equal texts are embedded once."""

        def documents(texts: Sequence[str]) -> Float32[np.ndarray, "t E"]:
            return self.encoder.encode(texts).document_vectors_NV

        return PairVectors(
            document_NV=embed_texts(documents, Candidates.of(pairs).texts, "teacher", progress),
            query_NV=embed_texts(self.encoder.encode_queries, pairs.queries, "teacher", progress),
            fingerprint=self.encoder.fingerprint,
        )


def fitted_positions(num_pairs: int) -> Int64[np.ndarray, " n"]:
    """Return the pairs, evenly spread, that axes and rotation are found from."""
    return np.arange(0, num_pairs, max(1, -(-num_pairs // FITTED_PAIRS)))


def laid_onto(taught: PairVectors, base: PairVectors) -> PairVectors:
    """Return the teacher's vectors in the width and the orientation of the base's, at unit length.

    ``base`` has the vectors of :func:`fitted_positions` first, and no more queries. A wider teacher keeps its
    first principal axes (not centred: scores are inner products).
    """
    fitted = fitted_positions(len(taught.query_NV))
    teacher_TE = np.concatenate([taught.document_NV[fitted], taught.query_NV[fitted]]).astype(np.float64)
    base_TD = np.concatenate([base.document_NV[: len(fitted)], base.query_NV]).astype(np.float64)
    _, _, axes_EE = np.linalg.svd(teacher_TE.T @ teacher_TE)
    axes_AE = axes_EE[: base_TD.shape[1]]
    # Procrustes: the orthonormal rows that bring the teacher's coordinates nearest to the base's.
    left_AA, _, right_AD = np.linalg.svd((teacher_TE @ axes_AE.T).T @ base_TD, full_matrices=False)
    map_ED = (axes_AE.T @ (left_AA @ right_AD)).astype(np.float32)
    return PairVectors(
        document_NV=unit(taught.document_NV @ map_ED),
        query_NV=unit(taught.query_NV @ map_ED),
        fingerprint=taught.fingerprint,
    )
