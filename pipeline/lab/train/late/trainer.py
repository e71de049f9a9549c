"""`cairn train-late` from end to end: a token projection for a base model whose weights stay as they are.

    pairs ─▶ without judged texts ─▶ batches of neighbours ─▶ token states, embedded once
      ─▶ steps ─▶ the best step on held-out batches ─▶ FOLDER/cairn_late.safetensors

FOLDER names its base, so ``--model FOLDER`` takes it as a model.

The projection begins at the principal directions of the states, the weights at the idf of their tokens in the
documents. Weights of tokens that no query holds stay there. The log stands beside the folder as
``FOLDER.jsonl``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline import durable
from cairn.pipeline.config import Backend, Precision
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.token_states import TokenStates
from cairn.pipeline.lab.train.late.data import LateData, draw_batches, embed_pairs, num_held_out
from cairn.pipeline.lab.train.late.head import TokenHead
from cairn.pipeline.lab.train.late.losses import LateBatch, late_loss, max_sims, padded_places, pool_padded
from cairn.pipeline.lab.train.late.settings import LateConfig
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.optimizer import cosine_lr_factor, set_lr
from cairn.pipeline.lab.train.output_folder import log_path_of, require_new
from cairn.pipeline.lab.train.pairs import read_pairs, text_numbers
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import (
    CAIRN_SETTINGS_NAME,
    Base,
    base_of_folder,
    encoder_config,
    settings_of_a_folder,
)
from cairn.pipeline.model.folders.names import is_folder, model_folder
from cairn.pipeline.token_vectors.codes import pool_neighbours
from cairn.pipeline.token_vectors.max_sim import token_idf
from cairn.pipeline.token_vectors.projection import TokenProjection, save_token_projection
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float32, Int64

STATES_SAMPLE: Final = 100_000
"""Token states that principal directions and root mean squares are taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateReport:
    """What a run did; scores are shares of held-out queries that find their document first.

    ``teacher_score`` is that of whole token states, None where nothing is held out.
    """

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    embed_seconds: float
    train_seconds: float
    first_loss: float
    last_loss: float
    teacher_score: float | None
    best_score: float | None
    best_step: int


def train_late(
    files: Sequence[Path],
    folder: Path,
    config: LateConfig,
    *,
    base: str,
    backend: Backend = "torch",
    precision: Precision = "auto",
    judged: Sequence[Path] = (),
    cache: Path | None = None,
    progress: ProgressListener = silent_progress,
) -> LateReport:
    """Train a token projection for ``base`` on pairs of ``files``; leave it in ``folder``, new or empty.

    Texts of ``judged`` evaluation sets are kept out of the data; token states are kept under ``cache``.
    """
    require_new(folder)
    log_path = log_path_of(folder)
    settings = encoder_config({"model": base, "backend": backend, "precision": precision})
    backbone = load_backbone(settings)
    if config.dims > backbone.model_dim:
        raise ConfigError(f"dims must be at most the base model's {backbone.model_dim}, got {config.dims}")
    pairs = draw_batches(without_judged(read_pairs(files), judged, progress), config)
    started = time.monotonic()
    data = embed_pairs(pairs, backbone, config, settings, cache=cache, progress=progress)
    embedded = time.monotonic()
    log = TrainingLog(log_path)
    run = LateRun(data, text_numbers(pairs.documents), config, backbone.tokenizer.get_vocab_size(), log)
    run.train(progress)
    sha256 = read_checkpoint(model_folder(base)).weights_sha256
    save_token_projection(folder, run.projection(sha256))
    if base_of_folder(model_folder(base)) is None:
        # The folder is a model of its own, for `--model`; beside a mixer the file goes into that folder.
        named = Base(model=str(Path(base).absolute()) if is_folder(base) else base, weights_sha256=sha256)
        content = {**settings_of_a_folder(settings), "base": asdict(named)}
        durable.write_json(folder / CAIRN_SETTINGS_NAME, content)
    return LateReport(
        folder=str(folder),
        pairs=len(pairs),
        skipped=pairs.skipped,
        embed_seconds=embedded - started,
        train_seconds=time.monotonic() - embedded,
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        teacher_score=run.teacher_score,
        best_score=run.best_score,
        best_step=run.best_step,
    )


class LateRun:
    """One training in memory."""

    def __init__(
        self,
        data: LateData,
        number_N: Int64[np.ndarray, " N"],
        config: LateConfig,
        vocabulary_size: int,
        log: TrainingLog,
    ) -> None:
        self._data, self._number_N, self._config, self._log = data, number_N, config, log
        documents = data.documents
        held_out = num_held_out(config, len(data.batches))
        self._held_out, self._batches = data.batches[:held_out], data.batches[held_out:]
        step = -(-len(documents.states_TV) // STATES_SAMPLE)
        self._sample_SD = documents.states_TV[::step].astype(np.float32)
        idf_X = token_idf(documents.ids_T, documents.offsets_N1, vocabulary_size)
        self._idf_X = torch.from_numpy(idf_X)
        self.head = TokenHead.of(self._sample_SD, idf_X, config.dims)
        self.losses: list[float] = []
        self.teacher_score: float | None = None
        self.best_score: float | None = None
        self.best_step = 0

    def train(self, progress: ProgressListener = silent_progress) -> None:
        """Make the steps and leave the projection as it was at the best of them."""
        config = self._config
        groups = [
            {"params": [self.head.matrix], "peak": config.peak_lr},
            {"params": [self.head.log_weight], "peak": config.term_lr},
        ]
        optimizer = torch.optim.Adam(groups, lr=config.peak_lr, betas=(0.9, 0.98))
        best = deepcopy(self.head.state_dict())
        for step in range(config.steps + 1):
            if step:
                self._step(step, optimizer)
                progress("train", step, config.steps, "steps")
            if (step % config.evaluate_every == 0 or step == config.steps) and self._is_best(step):
                best = deepcopy(self.head.state_dict())
        self.head.load_state_dict(best)

    def projection(self, base_sha256: str) -> TokenProjection:
        """Return what was trained, with the root mean squares of pooled vectors."""
        config, sample_SD = self._config, torch.from_numpy(self._sample_SD)
        saved_DV = self.head.matrix.detach().half().float()
        vectors_SV = F.normalize(sample_SD @ saved_DV, dim=1).numpy()
        bounds = np.arange(0, len(vectors_SV) + 1, len(vectors_SV))
        pooled_PV, _ = pool_neighbours(vectors_SV, bounds, config.pool_tokens)
        rms_V = np.sqrt((pooled_PV**2).mean(0))
        return self.head.projection(
            base_sha256, bits=config.bits, pool_tokens=config.pool_tokens, rms_V=rms_V
        )

    def _step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        config, started = self._config, time.monotonic()
        factor = cosine_lr_factor(step, steps=config.steps, warmup_steps=config.warmup_steps)
        set_lr(optimizer, factor)
        epoch, place = divmod(step - 1, len(self._batches))
        order = np.random.default_rng([config.seed, epoch]).permutation(len(self._batches))
        batch = self._batch(self._batches[int(order[place])])
        loss, terms = late_loss(self._student(batch), self._teacher(batch), batch.is_left_out_QN, config)
        if not math.isfinite(loss.item()):
            raise ModelError(f"the loss must be finite, got {loss.item()} in step {step}; lower peak_lr")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())
        seconds = round(time.monotonic() - started, 3)
        self._log.append(
            {"step": step, "loss": loss.item(), **terms, "lr": config.peak_lr * factor, "seconds": seconds}
        )

    def _student(self, batch: LateBatch) -> Float32[torch.Tensor, "Q N"]:
        weight_Qq = self.head.weights_of(batch.query_ids_Qq) * batch.is_query_Qq
        document_NtV = self.head(batch.document_NtD)
        pooled_NpV, is_pooled_Np = pool_padded(document_NtV, batch.is_document_Nt, self._config.pool_tokens)
        return max_sims(self.head(batch.query_QqD), weight_Qq, pooled_NpV, is_pooled_Np)

    @torch.no_grad()
    def _teacher(self, batch: LateBatch) -> Float32[torch.Tensor, "Q N"]:
        weight_Qq = self._idf_X[batch.query_ids_Qq] * batch.is_query_Qq
        return max_sims(batch.query_QqD, weight_Qq, batch.document_NtD, batch.is_document_Nt)

    @torch.no_grad()
    def _is_best(self, step: int) -> bool:
        """Score the held-out batches and say whether this step is the best so far; without any it is."""
        hits: list[list[float]] = []
        for pairs in self._held_out:
            batch = self._batch(pairs)
            scores = (self._student(batch), self._teacher(batch))
            hits.append([_hit_rate(score_QN, batch) for score_QN in scores])
        if not hits:
            self.best_step = step
            return True
        score, self.teacher_score = np.mean(hits, axis=0).tolist()
        self._log.append({"step": step, "heldout_hit": score, "teacher_hit": self.teacher_score})
        if self.best_score is not None and score <= self.best_score:
            return False
        self.best_score, self.best_step = score, step
        return True

    def _batch(self, pairs: Sequence[int]) -> LateBatch:
        mined = self._data.mined_Nk[list(pairs)].ravel()
        others = sorted(set(mined[mined >= 0].tolist()) - set(pairs))
        asked, candidates = np.array(pairs), np.array([*pairs, *others])
        query_QqD, ids_Qq, is_query_Qq = _padded(self._data.queries, asked)
        document_NtD, _, is_document_Nt = _padded(self._data.documents, candidates)
        is_same_QN = self._number_N[asked][:, None] == self._number_N[candidates][None]
        is_same_QN[np.arange(len(asked)), np.arange(len(asked))] = False
        return LateBatch(
            query_QqD=query_QqD,
            query_ids_Qq=ids_Qq,
            is_query_Qq=is_query_Qq,
            document_NtD=document_NtD,
            is_document_Nt=is_document_Nt,
            is_left_out_QN=torch.from_numpy(is_same_QN),
        )


def _padded(
    states: TokenStates, texts: Int64[np.ndarray, " n"]
) -> tuple[Float32[torch.Tensor, "n t D"], Int64[torch.Tensor, "n t"], Bool[torch.Tensor, "n t"]]:
    """Lay the states of some texts out as a rectangle; return it, the token ids and what is a token."""
    source, is_token = padded_places(states.offsets_N1, texts)
    vectors = torch.from_numpy(states.states_TV[source].astype(np.float32))
    return vectors, torch.from_numpy(states.ids_T[source].astype(np.int64)), torch.from_numpy(is_token)


def _hit_rate(score_QN: Float32[torch.Tensor, "Q N"], batch: LateBatch) -> float:
    best_Q = score_QN.masked_fill(batch.is_left_out_QN, -torch.inf).argmax(1)
    return float((best_Q == torch.arange(len(best_Q))).float().mean())
