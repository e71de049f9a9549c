"""What ``cairn distill`` makes of a step: rows of texts, their losses, the score of held-out texts.

N tokens    B texts    D width of the student
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.checkpoints import RunFolder, RunState
from cairn.pipeline.lab.train.distill.rows import packed_rows
from cairn.pipeline.lab.train.distill.settings import DistillConfig
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.objectives.hidden_states import state_loss
from cairn.pipeline.lab.train.packed_rows import PackedRows, pooled
from cairn.pipeline.lab.train.processes import Processes
from cairn.pipeline.lab.train.sequences import split_rows
from cairn.pipeline.lab.train.trainer import Report
from jaxtyping import Float, Float32, Int64

_BATCHES: Final = 23
"""What is drawn, as part of its seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillStep(Report):
    """What a step made of its texts."""

    num_texts: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillTask:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Task` for texts.

    ``rows`` are token ids by text, the last ``num_heldout`` of which are kept out, and a text's vector is the
    mean of their states from ``first_pooled`` on. ``teacher`` is None where its vectors of the texts,
    ``taught_ND``, are all that is followed.
    """

    files: RunFolder
    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    taught_ND: Float32[np.ndarray, "texts D"] | None
    layers: tuple[int, ...]
    state_weight: float
    rows: Sequence[Int64[np.ndarray, " _"]]
    first_pooled: int
    num_heldout: int
    config: DistillConfig
    processes: Processes

    def step(self, step: int) -> DistillStep:
        """See :class:`Task`."""
        texts = self._batch(step)
        packed = self._packed(texts)
        most = min(self.config.micro_batch_tokens, -(-len(packed.ids_N) // self.processes.size))
        parts = split_rows(packed, most)
        starts = np.cumsum([0, *map(len, parts)])
        loss = torch.zeros((), device=self.processes.device)
        for number in self.processes.share(len(parts)):
            part = parts[number]
            own = self._loss(part, texts[starts[number] : starts[number + 1]], packed)
            own.backward()
            loss += own.detach()
        self.processes.add_up_gradients(self.model.parameters())
        self.processes.add_up(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        return DistillStep(
            loss=float(loss), gradient_norm=float(norm), num_texts=len(texts), num_tokens=len(packed.ids_N)
        )

    def observed(self) -> Mapping[str, float]:
        """See :class:`Task`: nothing."""
        return {}

    def evaluate(self, state: RunState, log: TrainingLog) -> RunState:
        """See :class:`Task`: the mean cosine of held-out texts with the teacher's vectors."""
        is_due = state.step % self.config.evaluate_every == 0 or state.step == self.config.steps
        if not is_due or not self.num_heldout:
            return state
        texts = np.arange(len(self.rows) - self.num_heldout, len(self.rows))
        cosines: list[torch.Tensor] = []
        packed = self._packed(texts)
        start = 0
        with torch.no_grad(), self._autocast():
            for part in split_rows(packed, self.config.micro_batch_tokens):
                vectors_BD = pooled(self.model.states(part, landmarks=False)[self.model.num_layers], part)
                taught_BD = self._taught(part, texts[start : start + len(part)])
                cosines.append(_cosines(vectors_BD, taught_BD))
                start += len(part)
        score = float(torch.cat(cosines).mean())
        log.append({"step": state.step, "heldout_cosine": score})
        if score <= state.best_score:
            return state
        self.files.save_model("best", self.model)
        return replace(state, best_score=score, best_step=state.step)

    def _batch(self, step: int) -> Int64[np.ndarray, " B"]:
        """Return the texts of a step, each once before any comes again."""
        num_trained = len(self.rows) - self.num_heldout
        places = np.arange(step * self.config.batch_texts, (step + 1) * self.config.batch_texts)
        rounds = [
            np.random.default_rng([self.config.seed, _BATCHES, number]).permutation(num_trained)
            for number in range(places[0] // num_trained, places[-1] // num_trained + 1)
        ]
        return np.concatenate(rounds)[places - places[0] // num_trained * num_trained]

    def _packed(self, texts: Int64[np.ndarray, " B"]) -> PackedRows:
        return packed_rows([self.rows[text] for text in texts.tolist()], self.first_pooled)

    def _loss(self, part: PackedRows, texts: Int64[np.ndarray, " B"], whole: PackedRows) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of the ``whole`` batch.

        Hidden states weigh by its tokens, vectors by its texts.
        """
        with self._autocast():
            own_layers = range(1, self.model.num_layers + 1)
            states = self.model.states(part, layers=list(own_layers), landmarks=False)
            loss = torch.zeros((), device=self.model.device)
            taught_layers: Mapping[int, torch.Tensor] = {}
            if self.teacher is not None:
                with torch.no_grad():
                    taught_layers = self.teacher.states(
                        part, layers=sorted({*self.layers, self.teacher.num_layers}), landmarks=False
                    )
        if self.state_weight:
            pairs = [
                (states[own], taught_layers[layer])
                for own, layer in zip(own_layers, self.layers, strict=True)
            ]
            student, teacher = zip(*pairs, strict=True)
            token_share = len(part.ids_N) / len(whole.ids_N)
            distance = state_loss(student, teacher, self.config.state_loss)
            loss = loss + self.state_weight * token_share * distance
        if self.config.vector_weight:
            if self.teacher is not None:
                taught_BD = pooled(taught_layers[self.teacher.num_layers], part)
            else:
                taught_BD = self._taught(part, texts)
            vectors_BD = pooled(states[self.model.num_layers], part)
            distance = (1.0 - _cosines(vectors_BD, taught_BD)).sum() / len(whole)
            loss = loss + self.config.vector_weight * distance
        return loss

    def _taught(self, part: PackedRows, texts: Int64[np.ndarray, " B"]) -> torch.Tensor:
        """Return the teacher's vectors of texts."""
        if self.teacher is not None:
            return pooled(self.teacher.states(part, landmarks=False)[self.teacher.num_layers], part)
        assert self.taught_ND is not None, "a teacher is there, or its vectors are"
        return torch.from_numpy(self.taught_ND[texts]).to(self.model.device)

    def _autocast(self) -> torch.autocast:
        is_half = self.config.precision == "bf16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_half)


def _cosines(
    vectors_BD: Float[torch.Tensor, "B D"], taught_BV: Float[torch.Tensor, "B V"]
) -> Float[torch.Tensor, " B"]:
    """Compare the first dimensions, as many as the student is served with."""
    return F.cosine_similarity(vectors_BD[:, : taught_BV.shape[1]], taught_BV, dim=1)
