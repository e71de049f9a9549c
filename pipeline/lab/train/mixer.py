"""`cairn train-mixer`: a landmark mixer for a base model, trained on its vectors alone.

    pairs ─▶ without judged texts ─▶ a sample of pages ─▶ vectors, embedded once
      ─▶ steps ─▶ the best step ─▶ the rotation ─▶ folder

A query finds its passage, its sequence and both fused, and ranks as the base does:

    passages    InfoNCE over all landmarks of the batch and all pairs of neighbours; answers lie inside the
                query's own document, so that the rest of its sequence is among the negatives
    documents   InfoNCE over sequences, by the mean of their landmarks, and again fused with the best of them,
                as a search ranks
    ranking     KL from the base model's softmax over passages to the mixer's

Near duplicates of the answer by the base model are no negatives: a passage whose cosine with the answering
document is above .9, a sequence whose cosine with the answering one is above .93. Source: Morris & Rush 2024
(CDE), eq. 4 for the filter of false negatives by a surrogate; differs: the surrogate compares answers with
candidates, not queries.

The rotation behind the mixing is an orthogonal matrix whose first columns say most. It changes no cosine
between whole vectors, so it costs nothing where they are kept whole, and can only help where they are cut. It
begins with the principal directions of the base model's vectors, not centred, because cosines are not, and is
trained alone, on the vectors the trained mixer makes: cut to few dimensions they rank passages as whole (KL),
and find answers by themselves (InfoNCE). Steps stay on the orthogonal matrices by the Cayley transform of a
skew-symmetric one. Source: Kusupati et al. 2022 (Matryoshka) for the loss at several widths; differs: only
the rotation learns it, so that the whole vectors are those of a mixer trained without it.

    FOLDER/cairn_config.json          base, the encoder's settings, and the context of training
    FOLDER/cairn_extra.safetensors    the mixer's tensors, and what the base has in such a file of its own

    S sequences    L landmarks of the longest    Q queries    M passages    D width
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline import durable
from cairn.pipeline.config import Backend, ContextConfig, EncoderConfig, Precision
from cairn.pipeline.encode.encoder_fit import require_fit
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.grad_cache import summed_backward
from cairn.pipeline.lab.train.heldout import rank_scores
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.mixer_data import (
    BaseVectors,
    BatchMaker,
    MixerBatch,
    MixerData,
    draw_pairs,
    embed_sources,
)
from cairn.pipeline.lab.train.pair_vectors import pairs_fingerprint
from cairn.pipeline.lab.train.pairs import read_pairs
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.lab.train.token_head import principal_rotation
from cairn.pipeline.lab.train.trainer import (
    Batch,
    FrozenBaseRun,
    Score,
    claimed_folder,
    read_log,
    save_weights,
)
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import (
    CAIRN_SETTINGS_NAME,
    Base,
    base_of_folder,
    encoder_config,
    settings_of_a_folder,
)
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float, Float32, Int64
from safetensors.torch import load_file, save
from torch import nn
from torch.nn.utils import parametrizations

SAME_PASSAGE: Final = 0.9
SAME_SEQUENCE: Final = 0.93
DOCUMENT_WEIGHT: Final = 0.5
FUSED_WEIGHT: Final = 0.5
LEFT_OUT: Final = -1e4
"""A logit that no softmax lets through."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """Cosines of a batch's queries with its passages, its sequences and each sequence's best landmark."""

    passage_QM: Float32[torch.Tensor, "Q M"]
    sequence_QS: Float32[torch.Tensor, "Q S"]
    best_QS: Float32[torch.Tensor, "Q S"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgements:
    """What the base model says of a batch, and what answers what."""

    base: Compared
    is_answer_QM: Bool[torch.Tensor, "Q M"]
    is_left_out_QM: Bool[torch.Tensor, "Q M"]
    is_left_out_QS: Bool[torch.Tensor, "Q S"]
    sequence_Q: Int64[torch.Tensor, " Q"]


def mix_batch(
    mixer: LandmarkMixer, batch: MixerBatch
) -> tuple[Float32[torch.Tensor, "S L D"], Float32[torch.Tensor, "Q D"]]:
    """Return landmarks and queries as the mixer makes them."""
    return mixer.mix(batch.stretches, batch.context_CD), mixer.mix_queries(batch.query_QD, batch.context_CD)


def first_dims(vectors: Float[torch.Tensor, "*rows D"], dim: int) -> Float[torch.Tensor, "*rows d"]:
    """Cut vectors to their first dimensions and normalise them."""
    return F.normalize(vectors[..., :dim], dim=-1)


def passages_of(y_SLD: Float32[torch.Tensor, "S L D"], batch: MixerBatch) -> Float32[torch.Tensor, "M D"]:
    """Return the landmarks, then the pairs of neighbours, of all sequences."""
    is_landmark_SL = batch.stretches.is_landmark_SL
    pairs_SLD = F.normalize(y_SLD[:, :-1] + y_SLD[:, 1:], dim=-1)
    return torch.cat([y_SLD[is_landmark_SL], pairs_SLD[is_landmark_SL[:, 1:]]])


def compare(
    y_SLD: Float32[torch.Tensor, "S L D"], query_QD: Float32[torch.Tensor, "Q D"], batch: MixerBatch
) -> Compared:
    """Compare queries with landmarks of one space."""
    is_landmark_SL = batch.stretches.is_landmark_SL
    landmark_QSL = torch.einsum("qd,sld->qsl", query_QD, y_SLD).masked_fill(~is_landmark_SL, LEFT_OUT)
    return Compared(
        passage_QM=query_QD @ passages_of(y_SLD, batch).T,
        sequence_QS=query_QD @ _sequence_vectors(y_SLD, batch).T,
        best_QS=landmark_QSL.amax(-1),
    )


@torch.no_grad()
def judge(batch: MixerBatch) -> Judgements:
    """Say what answers each query and what is too near to the answer to be a negative."""
    x_SLD, document_SL = batch.stretches.x_SLD, batch.document_SL
    is_landmark_SL = batch.stretches.is_landmark_SL
    first_M = torch.cat([document_SL[is_landmark_SL], document_SL[:, :-1][is_landmark_SL[:, 1:]]])
    last_M = torch.cat([document_SL[is_landmark_SL], document_SL[:, 1:][is_landmark_SL[:, 1:]]])
    begins_QM, ends_QM = (batch.answer_Q[:, None] == documents_M for documents_M in (first_M, last_M))
    is_answer_QM = begins_QM & ends_QM
    is_near_QM = batch.answer_QD @ passages_of(x_SLD, batch).T > SAME_PASSAGE
    sequence_SD = _sequence_vectors(x_SLD, batch)
    is_near_QS = (sequence_SD @ sequence_SD.T > SAME_SEQUENCE)[batch.sequence_Q]
    is_near_QS[torch.arange(len(is_near_QS)), batch.sequence_Q] = False
    return Judgements(
        base=compare(x_SLD, batch.query_QD, batch),
        is_answer_QM=is_answer_QM,
        # A pair half inside the answer is neither right nor wrong.
        is_left_out_QM=(begins_QM | ends_QM | is_near_QM) & ~is_answer_QM,
        is_left_out_QS=is_near_QS,
        sequence_Q=batch.sequence_Q,
    )


def mixing_loss(
    mixer: LandmarkMixer, batch: MixerBatch, config: MixerConfig
) -> tuple[Float32[torch.Tensor, ""], dict[str, float]]:
    """Return the loss of a step, and its terms for the log.

    ``hit`` and ``base_hit`` are the shares of queries whose best passage answers, mixed and not.
    """
    judged = judge(batch)
    compared = compare(*mix_batch(mixer, batch), batch)
    passages = passage_loss(compared.passage_QM, judged, config.temperature)
    documents = _sequence_loss(compared.sequence_QS, judged, config.temperature)
    fused = _sequence_loss(fused_scores(compared), judged, config.temperature)
    ranking = ranking_loss(compared.passage_QM, judged.base.passage_QM, config.distillation_temperature)
    terms = {
        "passages": passages.item(),
        "documents": documents.item(),
        "fused": fused.item(),
        "ranking": ranking.item(),
    }
    hits = {"hit": hit_rate(compared, judged), "base_hit": hit_rate(judged.base, judged)}
    return (
        passages + DOCUMENT_WEIGHT * documents + FUSED_WEIGHT * fused + config.distillation_weight * ranking,
        terms | hits,
    )


def passage_loss(
    cosine_QM: Float32[torch.Tensor, "Q M"], judged: Judgements, temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return InfoNCE of queries with several answers each: -log of the answers' share."""
    logits_QM = (cosine_QM / temperature).masked_fill(judged.is_left_out_QM, LEFT_OUT)
    return (
        logits_QM.logsumexp(1) - logits_QM.masked_fill(~judged.is_answer_QM, LEFT_OUT).logsumexp(1)
    ).mean()


def ranking_loss(
    cosine_QM: Float32[torch.Tensor, "Q M"], teacher_QM: Float32[torch.Tensor, "Q M"], temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return KL(teacher ‖ student) of the queries' softmax over passages; the teacher gets no gradient."""
    teacher = (teacher_QM.detach() / temperature).log_softmax(1)
    return F.kl_div((cosine_QM / temperature).log_softmax(1), teacher, reduction="batchmean", log_target=True)


def fused_scores(compared: Compared) -> Float32[torch.Tensor, "Q S"]:
    """Return a sequence's score as a search fuses it: half its own, half its best landmark's."""
    return (compared.sequence_QS + compared.best_QS) / 2


def hit_rate(compared: Compared, judged: Judgements) -> float:
    """Return the share of queries whose best passage answers."""
    best_Q = compared.passage_QM.detach().masked_fill(judged.is_left_out_QM, LEFT_OUT).argmax(1)
    return float(judged.is_answer_QM[torch.arange(len(best_Q)), best_Q].float().mean())


def _sequence_loss(
    score_QS: Float32[torch.Tensor, "Q S"], judged: Judgements, temperature: float
) -> Float32[torch.Tensor, ""]:
    return F.cross_entropy(
        (score_QS / temperature).masked_fill(judged.is_left_out_QS, LEFT_OUT), judged.sequence_Q
    )


def _sequence_vectors(
    y_SLD: Float32[torch.Tensor, "S L D"], batch: MixerBatch
) -> Float32[torch.Tensor, "S D"]:
    return F.normalize((y_SLD * batch.stretches.is_landmark_SL[..., None]).sum(1), dim=-1)


MEASURES = ("heldout_score", "heldout_hit", "heldout_ndcg_at_10")


@torch.no_grad()
def score_mixer(
    mixer: LandmarkMixer,
    maker: BatchMaker,
    *,
    dims: Sequence[int],
    rotation_DD: Float32[torch.Tensor, "D D"] | None = None,
) -> dict[int, dict[str, float]]:
    """Return the measures by width of vectors cut to it, after ``rotation_DD`` where one is given.

    Empty where nothing is held out. The score is the mean of the share of passages that answer and nDCG@10 of
    sequences by fused scores.
    """
    sums = {dim: np.zeros(len(MEASURES)) for dim in dims}
    total = 0.0
    for batch, share in maker.heldout_batches():
        judged = judge(batch)
        y_SLD, query_QD = mix_batch(mixer, batch)
        if rotation_DD is not None:
            y_SLD, query_QD = y_SLD @ rotation_DD, query_QD @ rotation_DD
        for dim in dims:
            compared = compare(first_dims(y_SLD, dim), first_dims(query_QD, dim), batch)
            fused_QS = fused_scores(compared).masked_fill(judged.is_left_out_QS, LEFT_OUT)
            ndcg = rank_scores(fused_QS.numpy(), judged.sequence_Q.numpy())["heldout_ndcg_at_10"]
            hit = hit_rate(compared, judged)
            sums[dim] += share * np.array([(hit + ndcg) / 2, hit, ndcg])
        total += share
    return (
        {dim: dict(zip(MEASURES, (sums[dim] / total).tolist(), strict=True)) for dim in dims} if total else {}
    )


RotationBatch = tuple[torch.Tensor, torch.Tensor, Judgements]
"""Queries ``Q D`` and passages ``M D`` in one space, both unit vectors, and what answers what."""


class Rotation(nn.Module):
    """An orthogonal matrix in training, by the Cayley transform of a skew-symmetric one."""

    def __init__(self, start_DD: Float32[torch.Tensor, "D D"]) -> None:
        super().__init__()
        self.layer = nn.Linear(*start_DD.shape, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(start_DD)
        parametrizations.orthogonal(self.layer, orthogonal_map="cayley")

    @torch.no_grad()
    def exact(self) -> Float32[torch.Tensor, "D D"]:
        """Return the nearest orthogonal matrix: what rounding has added over the steps goes."""
        left_DD, _, right_DD = torch.linalg.svd(self.layer.weight.double())
        return (left_DD @ right_DD).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class CutVectors:
    """Implements :class:`Objective` for a rotation: the first ``dims`` of vectors rank like all.

    ``draw(step)`` gives vectors before the rotation, ``measure`` scores by width one that is.
    """

    model: Rotation
    draw: Callable[[int], RotationBatch]
    measure: Callable[[torch.Tensor], Mapping[int, float]]
    dims: Sequence[int]
    config: MixerConfig

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        return Batch(
            backward=partial(summed_backward, [partial(self._loss, step)]), report=lambda: {"of": "rotation"}
        )

    def score(self) -> Score | None:
        """See :class:`Objective`: the sum over widths."""
        found = self.measure(self.model.exact())
        measures = {f"heldout_score_first_{dim}": score for dim, score in found.items()}
        return Score(measures=measures, value=sum(found.values())) if found else None

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        save_weights(folder, self.model)

    def _loss(self, step: int) -> Float32[torch.Tensor, ""]:
        query_QD, passage_MD, judged = self.draw(step)
        whole_QM = query_QD @ passage_MD.T
        columns_Dd = self.model.layer.weight[:, : max(self.dims)]
        rotated_Qd, rotated_Md = query_QD @ columns_Dd, passage_MD @ columns_Dd
        terms: list[torch.Tensor] = []
        for dim in self.dims:
            cut_QM = first_dims(rotated_Qd, dim) @ first_dims(rotated_Md, dim).T
            terms += [
                ranking_loss(cut_QM, whole_QM, self.config.distillation_temperature),
                passage_loss(cut_QM, judged, self.config.temperature),
            ]
        return torch.stack(terms).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPassages:
    """Implements :class:`Objective` for a mixer, whose step 0 is the base model."""

    model: LandmarkMixer
    maker: BatchMaker
    config: MixerConfig

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        drawn = self.maker.training_batch(step + 1)
        report: dict[str, Any] = {"source": drawn.source}

        def loss() -> torch.Tensor:
            found, terms = mixing_loss(self.model, drawn, self.config)
            report.update(terms)
            return found

        return Batch(backward=partial(summed_backward, [loss]), report=lambda: report)

    def score(self) -> Score | None:
        """See :class:`Objective`."""
        scores = score_mixer(self.model, self.maker, dims=(self.model.width,)).get(self.model.width)
        return None if scores is None else Score(measures=scores, value=scores["heldout_score"])

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        save_weights(folder, self.model)


def save_mixer(
    folder: Path,
    mixer: LandmarkMixer,
    base: Base,
    settings: EncoderConfig,
    base_extra: Mapping[str, torch.Tensor] | None = None,
    context: ContextConfig | None = None,
) -> None:
    """Write a mixer with its base and settings, whole or not at all.

    It was trained behind the ``context``, None: behind none. ``base_extra`` are tensors of ours beside the
    base's weights: the folder's stand in their place.
    """
    with (
        durable.storage_errors(f"saving the mixer to {folder}"),
        durable.replacing_folder(folder) as temporary,
    ):
        durable.write_json(
            temporary / CAIRN_SETTINGS_NAME, {**settings_of_a_folder(settings, context), "base": asdict(base)}
        )
        tensors = {
            f"{LANDMARK_MIXER}{name}": tensor.detach().float().contiguous()
            for name, tensor in mixer.state_dict().items()
        }
        # As bytes: a file safetensors makes is for its owner alone.
        durable.write_bytes(
            temporary / EXTRA_NAME, save({**(base_extra or {}), **tensors}, metadata={"format": "pt"})
        )


ROTATION_SAMPLE: Final = 16_384
"""Vectors of chunks, and as many of queries, whose principal directions the rotation begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerReport:
    """What a run did; scores are of held-out pages, None without any.

    ``cut_scores`` are those of vectors cut to their first dimensions.
    """

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    sources: int
    embed_seconds: float
    train_seconds: float
    first_loss: float
    last_loss: float
    base_score: float | None
    best_score: float | None
    best_step: int
    cut_scores: Mapping[int, float] = field(default_factory=dict[int, float])


def train_mixer(
    files: Sequence[Path],
    folder: Path,
    config: MixerConfig,
    *,
    base: str,
    backend: Backend = "torch",
    precision: Precision = "auto",
    judged: Sequence[Path] = (),
    cache: Path | None = None,
    whole_text_tokens: int = 0,
    progress: ProgressListener = silent_progress,
) -> MixerReport:
    """Train a mixer for ``base`` on the pairs of ``files`` and leave it in ``folder``, new or empty.

    Texts of ``judged`` evaluation sets are kept out of the data; vectors are kept under ``cache`` for the
    next run. ``whole_text_tokens`` is a setting the folder brings to those who encode with it: the mixer
    learns from chunks.
    """
    place = FrozenBaseRun(folder)
    place.require_new()
    named, settings, base_extra = _base(base, backend, precision)
    pairs = draw_pairs(without_judged(read_pairs(files), judged, progress), config)
    started = time.monotonic()
    vectors = BaseVectors(settings, cache, config.context)
    dims = _require_fit(vectors, config)
    brought = replace(settings, use_context=config.context is not None, whole_text_tokens=whole_text_tokens)
    require_fit(brought, vectors.encoder.backbone)
    made_of = {"base": vectors.encoder.fingerprint, "pairs": pairs_fingerprint(pairs)}
    with claimed_folder(place.files, config, made_of, pairs.skipped):
        data = embed_sources(pairs, vectors, config, progress)
        embedded = time.monotonic()
        mixing = _mixing(data, config)
        state = place.train(mixing, config, progress)
        mixing.model.eval()
        cut_scores = _train_rotation(mixing, dims, place, state.log_bytes, progress)
        save_mixer(folder, mixing.model, named, brought, base_extra, config.context)
    records = read_log(place.log_path)
    losses = [record["loss"] for record in records if "source" in record]
    place.finish()
    return MixerReport(
        folder=str(folder),
        pairs=len(pairs),
        skipped=pairs.skipped,
        sources=len(data.sources),
        embed_seconds=embedded - started,
        train_seconds=time.monotonic() - embedded,
        first_loss=losses[0],
        last_loss=losses[-1],
        base_score=None if state.best_score is None else records[0]["heldout_score"],
        best_score=state.best_score,
        best_step=state.best_step,
        cut_scores=cut_scores,
    )


def _mixing(data: MixerData, config: MixerConfig) -> MixedPassages:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        mixer = LandmarkMixer(data.width, config.num_heads, config.head_dim)
    # A rotation changes no whole vector: it is left out until the mixing is trained.
    mixer.turn.requires_grad_(False)
    return MixedPassages(model=mixer, maker=BatchMaker(data, config), config=config)


def _train_rotation(
    mixing: MixedPassages,
    dims: tuple[int, ...],
    place: FrozenBaseRun,
    log_begins: int,
    progress: ProgressListener,
) -> Mapping[int, float]:
    """Find the rotation, give it to the mixer, and return the scores of vectors cut to ``dims``.

    The principal rotation stays where the trained one does not score more.
    """
    config, mixer, maker = mixing.config, mixing.model, mixing.maker

    @torch.no_grad()
    def draw(step: int) -> RotationBatch:
        batch = maker.training_batch(config.steps + 1 + step)
        y_SLD, query_QD = mix_batch(mixer, batch)
        return query_QD, passages_of(y_SLD, batch), judge(batch)

    def measure(rotation_DD: torch.Tensor) -> Mapping[int, float]:
        found = score_mixer(mixer, maker, dims=dims, rotation_DD=rotation_DD)
        return {dim: measures["heldout_score"] for dim, measures in found.items()}

    rotation = Rotation(torch.from_numpy(principal_rotation(maker.sample_vectors(ROTATION_SAMPLE))))
    if config.rotation_steps:
        objective = CutVectors(model=rotation, draw=draw, measure=measure, dims=dims, config=config)
        place.train(objective, config.of_rotation, progress, stage="rotation", log_begins=log_begins)
    rotation_DD = rotation.exact()
    scores = measure(rotation_DD)
    with torch.no_grad():
        mixer.turn.copy_(rotation_DD)
    return scores


def _base(
    base: str, backend: Backend, precision: Precision
) -> tuple[Base, EncoderConfig, dict[str, torch.Tensor]]:
    """Return the base as the folder names it, the settings texts are embedded with, and its extra tensors.

    Raises :class:`ConfigError` for a model no mixer goes with.
    """
    folder = model_folder(base)
    checkpoint = None if base_of_folder(folder) else read_checkpoint(folder)
    if (
        checkpoint is None
        or is_cde(checkpoint.config)
        or any(name.startswith(LANDMARK_MIXER) for name in checkpoint.tensors)
    ):
        raise ConfigError(
            f"a mixer must be trained for one transformer that has no mixer yet, got {base!r}; choose "
            "another base"
        )
    # A folder must be found from elsewhere, too.
    is_path = folder == Path(base).expanduser()
    named = Base(model=str(folder.absolute()) if is_path else base, weights_sha256=checkpoint.weights_sha256)
    settings = encoder_config({"model": named.model, "backend": backend, "precision": precision})
    extra = {} if checkpoint.extra_path is None else load_file(checkpoint.extra_path)
    return named, replace(settings, use_context=False, dims=None), extra


def _require_fit(vectors: BaseVectors, config: MixerConfig) -> tuple[int, ...]:
    """Return the dimensions the rotation is trained for.

    Raise for a base or dimensions that do not go with a mixer.
    """
    backbone = vectors.encoder.backbone
    if backbone.embedding_dim != backbone.context_dim:
        raise ModelError(
            "a mixer needs a base whose vectors are as wide as its hidden states, got "
            f"{backbone.embedding_dim} and "
            f"{backbone.context_dim}; choose another base"
        )
    return config.dims_of(backbone.embedding_dim)
