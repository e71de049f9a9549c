"""The data of a run on pairs, made once: tokens, the surrogate's vectors, negatives, what teachers say.

Vectors and scores stay in the run's folder, so a run that goes on embeds nothing again.

    N pairs    k own negatives of a query    K = 1 + k candidates
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.documents import like_headed
from cairn.pipeline.lab.train.pair_vectors import (
    NONE_FOUND,
    PairVectors,
    Teacher,
    candidate_scores,
    embed_pairs,
    fitted_positions,
    kept_vectors,
    laid_onto,
    mine_hard_negatives,
    pairs_fingerprint,
    vectors_key,
)
from cairn.pipeline.lab.train.pairs import Candidates, TrainingPairs, text_numbers
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What steps draw on: texts by position of their pair, surrogate vectors, mined negatives.

    Equal documents share a number. ``taught`` are the vectors of a teacher other than the base, of the width
    of the model's; ``scores_NK`` are a cross-encoder's of each pair's document and hard negatives. ``idf_X``
    weighs token ids in the teacher's late interaction, None without any.
    ``pool_of_pair`` are the documents of each pair's source, where contexts are drawn from sources.
    """

    maker: SequenceMaker
    vectors: PairVectors
    document_number_N: Int64[np.ndarray, " NM"]
    hard_negatives_Nk: Int64[np.ndarray, "N k"]
    taught: PairVectors | None = None
    scores_NK: Float32[np.ndarray, "N K"] | None = None
    idf_X: Float32[torch.Tensor, " X"] | None = None
    pool_of_pair: Sequence[Int64[np.ndarray, " _"]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairData:
    """What the data of a run is made of."""

    pairs: TrainingPairs
    heldout: Int64[np.ndarray, " n"]
    checkpoint: Checkpoint
    served: EncoderConfig
    config: TrainConfig
    teacher: Teacher | None
    score_teacher: CrossEncoderReranker | None

    @property
    def fingerprints(self) -> Mapping[str, str | None]:
        """Identify the base, the pairs and the teachers."""
        return {
            "base": self.checkpoint.fingerprint,
            "pairs": pairs_fingerprint(self.pairs),
            "teacher": None if self.teacher is None else self.teacher.encoder.fingerprint,
            "score teacher": None if self.score_teacher is None else self.score_teacher.fingerprint,
        }

    def require_negatives(self) -> None:
        """Raise :class:`SourceError` where queries are ranked against their own negatives, and none has any.

        Mined ones are known only when the pairs are embedded.
        """
        pairs, config = self.pairs, self.config
        if config.only_own_negatives and not (config.hard_negatives or any(pairs.negatives)):
            _require_any(like_headed(pairs, self.heldout))

    def prepare(self, folder: Path, progress: ProgressListener) -> TrainingData:
        """Embed the pairs, find hard negatives, ask the teachers; vectors and scores stay in ``folder``.

        Pairs without the negatives that the settings ask for raise :class:`SourceError`.
        """
        backbone = load_backbone(EncoderConfig(model=self.served.model))
        maker = self._sequence_maker(backbone.max_positions)
        maker.require_room(backbone.max_positions)
        surrogate = self.config.surrogate
        vectors = kept_vectors(
            folder / "surrogate.safetensors",
            vectors_key(surrogate, self.checkpoint.fingerprint, self.pairs),
            lambda: embed_pairs(self.pairs, backbone, surrogate, progress),
        )
        candidates = Candidates.of(self.pairs)
        document_number_N = text_numbers(candidates.texts)
        own_Nk = self._negatives(vectors, candidates, document_number_N, progress)
        return TrainingData(
            maker=maker,
            vectors=vectors,
            document_number_N=document_number_N,
            hard_negatives_Nk=own_Nk,
            taught=self._taught(folder, backbone, progress),
            scores_NK=self._scores(folder, candidates, own_Nk, progress),
            pool_of_pair=pools_of_sources(self.pairs, self.heldout)
            if self.config.context_from == "source"
            else None,
        )

    def _sequence_maker(self, max_positions: int) -> SequenceMaker:
        return SequenceMaker(
            self.checkpoint,
            self.pairs,
            pooling=self.config.pooling,
            max_query_tokens=self.config.max_query_tokens,
            max_document_tokens=self.config.max_document_tokens,
            attention=self.config.attention,
            window_tokens=min(self.served.window_tokens, max_positions),
            query_prefix=self.served.query_prefix,
            document_prefix=self.served.document_prefix,
            pool_prefix=self.served.pool_prefix,
        )

    def _negatives(
        self,
        vectors: PairVectors,
        candidates: Candidates,
        document_number_N: Int64[np.ndarray, " NM"],
        progress: ProgressListener,
    ) -> Int64[np.ndarray, "N k"]:
        """Return the places of each pair's own negatives: those that it brings, else mined ones.

        None is held out.
        """
        pairs, config = self.pairs, self.config
        given_Nk = candidates.given_Nk.copy()
        is_held_out = np.isin(document_number_N, document_number_N[self.heldout])
        given_Nk[is_held_out[given_Nk] & (given_Nk != NONE_FOUND)] = NONE_FOUND
        mined_Nk = np.zeros((len(pairs), 0), np.int64)
        if config.hard_negatives:
            progress("mining", 0, len(pairs), "pairs")
            mined_Nk = mine_hard_negatives(
                vectors.query_NV,
                vectors.document_NV[: len(pairs)],
                pairs.documents,
                pairs.sources,
                num_negatives=config.hard_negatives,
                max_share=config.hard_negative_share,
                margin=config.hard_negative_margin,
                left_out=self.heldout,
            )
            mined_Nk[(given_Nk != NONE_FOUND).any(1)] = NONE_FOUND
        own_Nk = np.concatenate([mined_Nk, given_Nk, like_headed(pairs, self.heldout)], axis=1)
        num_without = int((own_Nk == NONE_FOUND).all(1).sum())
        if config.only_own_negatives and num_without:
            _require_any(own_Nk)
            logger.warning("%d of %d pairs have no negatives and teach nothing", num_without, len(pairs))
        return own_Nk

    def _taught(self, folder: Path, backbone: Backbone, progress: ProgressListener) -> PairVectors | None:
        """Embed the pairs with the teacher, None without one."""
        teacher, pairs = self.teacher, self.pairs
        if teacher is None:
            return None

        def embed() -> PairVectors:
            fitted = pairs.take(fitted_positions(len(pairs)).tolist(), "not fitted")
            return laid_onto(
                teacher.embed(pairs, progress), embed_pairs(fitted, backbone, "encoder", progress)
            )

        key = fingerprint(
            teacher=teacher.encoder.fingerprint,
            base=backbone.weights_fingerprint,
            pairs=pairs_fingerprint(pairs),
        )
        return kept_vectors(folder / "teacher.safetensors", key, embed)

    def _scores(
        self,
        folder: Path,
        candidates: Candidates,
        own_Nk: Int64[np.ndarray, "N k"],
        progress: ProgressListener,
    ) -> Float32[np.ndarray, "N K"] | None:
        """Score each query's candidates with the cross-encoder, None without one."""
        if self.score_teacher is None:
            return None
        if not (np.delete(own_Nk, self.heldout, axis=0) != NONE_FOUND).any():
            raise SourceError(
                "pairs must have negatives that score_teacher ranks with their documents, got none; mine "
                "some with --hard-negatives, or give a column negatives"
            )
        return candidate_scores(
            folder / "scores.safetensors",
            self.score_teacher,
            self.pairs.queries,
            candidates.texts,
            own_Nk,
            self.heldout,
            progress,
        )


def _require_any(negatives_Nk: Int64[np.ndarray, "N k"]) -> None:
    if (negatives_Nk == NONE_FOUND).all():
        raise SourceError(
            "pairs must have negatives where a query is ranked against its own alone, got none; give a "
            "column negatives or hard_negatives, or leave negatives at batch"
        )


def pools_of_sources(pairs: TrainingPairs, heldout: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " _"]]:
    """Return for each pair the pairs of its source with different documents, held-out ones left out."""
    left_out = set(heldout.tolist())
    first: dict[str, dict[str, int]] = {source: {} for source in pairs.sources}
    for position, (source, document) in enumerate(zip(pairs.sources, pairs.documents, strict=True)):
        if position not in left_out:
            first[source].setdefault(document, position)
    pools = {source: np.array(list(own.values()), np.int64) for source, own in first.items()}
    return [pools[source] for source in pairs.sources]
