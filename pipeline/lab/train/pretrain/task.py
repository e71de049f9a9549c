"""What ``cairn pretrain`` makes of a step: masked rows, the terms of their loss, held-out rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from cairn.pipeline.lab.train.checkpoints import RunFolder, RunState
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.pretrain.masking import Vocabulary, masked
from cairn.pipeline.lab.train.pretrain.objectives import OBJECTIVES, MaskedPart, PretrainHeads
from cairn.pipeline.lab.train.pretrain.settings import PretrainConfig
from cairn.pipeline.lab.train.pretrain.stream import StreamRows, TokenStream
from cairn.pipeline.lab.train.processes import Processes
from cairn.pipeline.lab.train.trainer import Report

_MASKS, _HELD_OUT = 15, 17
"""What is drawn, as part of its seed."""

HELD_OUT_STEP: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainStep(Report):
    """What a step made of its rows; ``terms`` are those of the loss by name."""

    num_tokens: int
    num_scored: int
    terms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainTask:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Task` for rows of text."""

    files: RunFolder
    model: LandmarkEncoder
    heads: PretrainHeads
    stream: TokenStream
    vocabulary: Vocabulary
    config: PretrainConfig
    processes: Processes

    def step(self, step: int) -> PretrainStep:
        """See :class:`Task`."""
        plain = self.stream.batch(step)
        parts = self._parts(plain, step, np.random.default_rng([self.config.seed, _MASKS, step]))
        terms = Counter(dict.fromkeys(self._names(), 0.0))
        for number in self.processes.share(len(parts)):
            found = self._terms(parts[number])
            loss = torch.stack([term for name, term in found.items() if "/" not in name]).sum()
            loss.backward()
            terms.update({name: term.item() for name, term in found.items()})
        self.processes.add_up_gradients(self.model.parameters())
        whole = self._of_all(terms)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        return PretrainStep(
            loss=_loss(whole),
            gradient_norm=float(norm),
            num_tokens=len(plain.rows.ids_N),
            num_scored=parts[0].num_scored,
            terms=whole,
        )

    def observed(self) -> Mapping[str, float]:
        """See :class:`Task`: nothing beside the terms."""
        return {}

    @torch.no_grad()
    def evaluate(self, state: RunState, log: TrainingLog) -> RunState:
        """See :class:`Task`: the loss of the held-out rows, the lowest of which is the best."""
        is_due = state.step % self.config.evaluate_every == 0 or state.step == self.config.steps
        if not is_due or not self.stream.heldout:
            return state
        generator = np.random.default_rng([self.config.seed, _HELD_OUT])
        plain = self.stream.lay_out(self.stream.heldout, generator)
        terms: Counter[str] = Counter()
        for part in self._parts(plain, HELD_OUT_STEP, generator):
            terms.update({name: term.item() for name, term in self._terms(part).items()})
        log.append({"step": state.step, "heldout_loss": _loss(terms), "heldout_terms": dict(terms)})
        score = -_loss(terms)
        if state.step and score <= state.best_score:
            return state
        self.files.save_model("best", self.model)
        return replace(state, best_score=score, best_step=state.step)

    def _parts(self, plain: StreamRows, step: int, generator: np.random.Generator) -> Sequence[MaskedPart]:
        hidden, scored = masked(plain, self.config.masked, self.vocabulary, generator)
        return list(self._cut(plain, hidden, scored, step))

    def _cut(
        self, plain: StreamRows, hidden: StreamRows, scored: np.ndarray, step: int
    ) -> Iterator[MaskedPart]:
        most = min(self.config.micro_batch_tokens, -(-len(plain.rows.ids_N) // self.processes.size))
        first, start = 0, 0
        for whole, masked_part in zip(plain.split(most), hidden.split(most), strict=True):
            end = start + len(whole.rows.ids_N)
            yield MaskedPart(
                plain=whole,
                hidden=masked_part,
                scored_K=scored[(scored >= start) & (scored < end)] - start,
                first=first,
                step=step + 1,
                num_scored=len(scored),
                num_words=int(plain.is_text_N.sum()),
            )
            first, start = first + len(whole.rows), end

    def _terms(self, part: MaskedPart) -> Mapping[str, torch.Tensor]:
        is_half = self.config.precision == "bf16"
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_half):
            return OBJECTIVES[self.config.objective](self.model, self.heads, part, self.config)

    def _names(self) -> list[str]:
        """Return the terms that every process has, in order."""
        layers = self.config.matryoshka_layers or (self.model.num_layers,)
        widths = self.config.matryoshka_dims or (self.model.model_dim,)
        own = ["mlm"] if self.heads.decoder is None else ["mlm", "decoder"]
        return own + [f"mlm/{layer}/{width}" for layer in layers for width in widths]

    def _of_all(self, terms: Mapping[str, float]) -> dict[str, float]:
        """Return the terms of all processes' micro-batches."""
        if self.processes.size == 1:
            return dict(terms)
        values = torch.tensor(list(terms.values()), device=self.processes.device)
        self.processes.add_up(values)
        return dict(zip(terms, values.tolist(), strict=True))


def _loss(terms: Mapping[str, float]) -> float:
    return sum(value for name, value in terms.items() if "/" not in name)
