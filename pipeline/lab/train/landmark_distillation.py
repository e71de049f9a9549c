"""`cairn train-landmarks`: landmark states follow what the base itself makes of each chunk and its title.

    document ─▶ windows ─┬─▶ student   [CLS] title [LMK] z1 [LMK] z2 [LMK] …      states of [LMK], of tokens
                         └─▶ base      [CLS] title [LMK] z1 [LMK] · [CLS] title [LMK] z2 [LMK] · …
                                       means of chunks, states

A published encoder pools the mean, and its [LMK] states are fit for nothing. The base is its own teacher
here: no queries, no labels, no second model. A landmark follows the mean y of its chunk, which the base reads
behind the title where the window shows one, as an untrained base is served; a title's landmark follows the
mean of the title alone. The loss is

    mean (1 - cos(s_m, y_m)) + mean (s sᵀ - y yᵀ)² + k · mean (1 - cos(h_n, x_n))

over the batch's landmark states s; h_n are the student's states of tokens and x_n the base's, so that token
vectors stay those that late interaction knows. The input tables stay as the base has them.

Source: landmarks and their windows are those of LMK pooling (algorithm 1, variable granularity); following a
model's own pooled vectors is a way of our own, after the self-distillation of Furlanello et al. 2018.

    N tokens of a batch    M landmarks of it    D width
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.distill import is_plain
from cairn.pipeline.lab.train.gradients import Embedded, cached_backward
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder, autocast
from cairn.pipeline.lab.train.leakage import read_judged_texts
from cairn.pipeline.lab.train.packed_rows import own_places, pooled, split
from cairn.pipeline.lab.train.pairs import counted, read_rows, training_files
from cairn.pipeline.lab.train.settings import LandmarkConfig
from cairn.pipeline.lab.train.trainer import (
    Batch,
    RunReport,
    Score,
    Trainer,
    claimed_folder,
    deadline_in,
    places_of_step,
    resolved,
)
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.precision import default_device
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.landmarks import Chunks, Rows, lay_out, split_into_chunks
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32, Int32

CHARACTERS_PER_TOKEN: Final = 4
"""So long is a window's text for each of its tokens; what its tokens do not hold is left out."""

_BATCHES, _DRAWN = 41, 42
"""What is drawn, as part of its seed."""

_SPACE: Final = re.compile(r"\s")


class Window(NamedTuple):
    """A stretch of a document, with the document's title; a query is one without a title."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Windows in an order that their files have no influence on, all of one document side by side."""

    windows: tuple[Window, ...]
    skipped: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def fingerprint(self) -> str:
        """Identify the windows, in their order."""
        return fingerprint(
            titles=[one.title for one in self.windows], texts=[one.text for one in self.windows]
        )


def read_windows(paths: Sequence[Path], window_tokens: int, judged: Sequence[Path] = ()) -> Windows:
    """Cut the documents of training files into windows."""
    documents, skipped = read_documents(paths, judged)
    room = CHARACTERS_PER_TOKEN * window_tokens
    windows = [Window(one.title, part) for one in documents for part in _parts(one.text, room)]
    return Windows(windows=tuple(windows), skipped=skipped)


def read_documents(paths: Sequence[Path], judged: Sequence[Path] = ()) -> tuple[list[Window], dict[str, int]]:
    """Return the documents of training files and why others are left out; their files' order moves nothing.

    Neighbouring rows with one title are one document. Files have a column text, or document, and title and
    query where they have them; a query is a document of its own. What stands in a ``judged`` set is left out
    and counted, like empty and repeated texts. Files without a text raise :class:`SourceError`, a mistyped
    column :class:`SchemaError`.
    """
    out = read_judged_texts(judged) if judged else None
    skipped: Counter[str] = Counter()
    documents: dict[Window, None] = {}
    for file in training_files(paths):
        for one in _joined(file):
            if not one.text.strip():
                skipped["empty text"] += 1
            elif out is not None and (out.has_document(one.text) or out.has_query(one.text)):
                skipped["text of an evaluation set"] += 1
            elif one in documents:
                skipped["repeated text"] += 1
            else:
                documents[one] = None
    if not documents:
        raise SourceError(f"files of texts must hold at least one, got {counted(skipped)}; name others")
    return sorted(documents, key=_digest), dict(skipped)


def _joined(file: SourceFile) -> Iterator[Window]:
    """Yield a file's documents and queries."""
    title, parts = "", list[str]()
    columns = ("title", "text", "document", "query")
    for of_row, text, document, query in read_rows(file, columns):
        if query.strip():
            yield Window("", query.strip())
        if parts and (not of_row or of_row != title):
            yield Window(title, "\n\n".join(parts))
            parts = []
        title = of_row.strip()
        parts.append(text or document)
    if parts:
        yield Window(title, "\n\n".join(parts))


def _digest(window: Window) -> bytes:
    text = f"{window.title}\0{window.text}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _parts(text: str, room: int) -> Iterator[str]:
    """Cut a text at white space into parts of at most ``room`` characters, all about as long."""
    size = -(-len(text) // max(1, -(-len(text) // room)))
    start = 0
    while len(text) - start > room:
        spaces = [match.start() for match in _SPACE.finditer(text, start + 1, start + size + 1)]
        end = spaces[-1] if spaces else start + size
        yield text[start:end]
        start = end
    yield text[start:]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lesson:
    """Rows of a batch as the student reads them, each landmark pooled by itself, and what it is to follow."""

    rows: Rows
    vectors_MD: Float32[torch.Tensor, "M D"]
    states_ND: Float32[torch.Tensor, "N D"]
    is_taught_N: Float32[torch.Tensor, " N"]
    """1 for tokens of chunks and titles, 0 for [CLS] and landmarks."""


@dataclass(frozen=True, kw_only=True)
class FollowedChunks:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for landmark states.

    The windows of the last documents, ``num_heldout`` in all, are never trained on.
    """

    model: LandmarkEncoder
    base: LandmarkEncoder
    checkpoint: Checkpoint
    windows: Sequence[Window]
    num_heldout: int
    config: LandmarkConfig
    folder: EncoderFolder

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        generator = np.random.default_rng([self.config.seed, _DRAWN, step])
        config, num_trained = self.config, len(self.windows) - self.num_heldout
        places = places_of_step(step, config.batch_windows, num_trained, config.seed, _BATCHES)
        lesson = self.lesson([self.windows[place] for place in places.tolist()], generator)
        parts = split(lesson.rows, self.config.micro_batch_tokens)
        token_ends = np.cumsum([len(part.ids) for part in parts])
        stages = [
            partial(self._embed, part, lesson, slice(end - len(part.ids), end))
            for part, end in zip(parts, token_ends.tolist(), strict=True)
        ]
        measured: dict[str, float] = {}
        return Batch(
            backward=lambda: cached_backward((), stages, partial(self._loss, lesson, measured)),
            report=lambda: {
                **measured,
                "num_landmarks": len(lesson.vectors_MD),
                "num_tokens": len(lesson.rows.ids),
            },
        )

    def score(self) -> Score | None:
        """See :class:`Objective`: the mean cosine of held-out landmarks with what they follow."""
        if not self.num_heldout:
            return None
        cosines: list[torch.Tensor] = []
        of_tokens: list[torch.Tensor] = []
        with torch.no_grad():
            for lesson in self._heldout:
                landmarks_MD, distance_N1 = self._embed(lesson.rows, lesson, slice(None), None)
                cosines.append(F.cosine_similarity(landmarks_MD, lesson.vectors_MD))
                of_tokens.append(1.0 - distance_N1[lesson.is_taught_N > 0, 0])
        cosine_M = torch.cat(cosines)
        measures = {
            "heldout_cosine": float(cosine_M.mean()),
            "heldout_cosine_p5": float(cosine_M.quantile(0.05)),
            "heldout_token_cosine": float(torch.cat(of_tokens).mean()),
        }
        return Score(measures=measures, value=measures["heldout_cosine"])

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        self.folder.save(folder, self.model)

    @cached_property
    def _heldout(self) -> tuple[Lesson, ...]:
        """Return the held-out windows with the middle interval, their titles shown."""
        held = self.windows[len(self.windows) - self.num_heldout :]
        size = self.config.batch_windows
        groups = [held[start : start + size] for start in range(0, len(held), size)]
        return tuple(self.lesson(group, None) for group in groups)

    def lesson(self, windows: Sequence[Window], generator: np.random.Generator | None) -> Lesson:
        """Lay windows out, without a generator with the middle interval and all titles; ask the base."""
        config, tokenizer = self.config, self.checkpoint.tokenizer
        if generator is None:
            interval_B = np.full(len(windows), config.served_interval)
            shows_B = np.ones(len(windows), np.bool_)
        else:
            interval_B = generator.choice(np.array(config.landmark_intervals, np.int64), len(windows))
            shows_B = generator.random(len(windows)) < config.title_share
        texts = tokenize(tokenizer, [one.text for one in windows])
        titles = tokenize(tokenizer, [one.title for one in windows])
        chunks = split_into_chunks(texts.breaks, texts.text_offsets, interval_B)
        chunk_ids = np.split(texts.ids, chunks.token_offsets[1:-1])
        title_ids = np.split(titles.ids, titles.text_offsets[1:-1])
        room = config.window_tokens - (self.checkpoint.cls_id is not None)
        rows: list[list[Int32[np.ndarray, " _"]]] = []
        title_M: list[Int32[np.ndarray, " _"]] = []
        """What each part is read behind alone: its title, of a title nothing."""
        for row, shows in enumerate(shows_B.tolist()):
            title = title_ids[row][: config.title_tokens if shows else 0]
            own = chunk_ids[chunks.chunk_offsets[row] : chunks.chunk_offsets[row + 1]]
            shown = [title, *own] if len(title) else own
            ends = np.cumsum([len(part) + 1 for part in shown])
            rows.append(shown[: max(1, int(np.searchsorted(ends, room, side="right")))])
            title_M += [title[: len(title) * (place > 0)] for place in range(len(rows[-1]))]
        return self._taught(rows, title_M)

    def _taught(
        self, rows: Sequence[Sequence[Int32[np.ndarray, " _"]]], title_M: Sequence[Int32[np.ndarray, " _"]]
    ) -> Lesson:
        """Let the base read each title and each chunk alone, and lay what it makes of them onto the rows."""
        parts = [part for row in rows for part in row]
        chunks = Chunks(
            token_offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
            chunk_offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        )
        read = partial(
            lay_out,
            np.concatenate(parts),
            chunks,
            cls_id=self.checkpoint.cls_id,
            landmark_id=self.checkpoint.landmark_id,
        )
        student = read(attention="full", pooling="lmk", max_window_tokens=self.config.window_tokens)
        alone = read(attention="chunk", pooling="mean", titles=title_M, are_of_chunks=True)
        means, states = list[torch.Tensor](), list[torch.Tensor]()
        with torch.no_grad(), autocast(self.base, self.config):
            for some in split(alone, self.config.micro_batch_tokens):
                of_some_ND = self.base.states(some)[self.base.num_layers].float()
                means.append(pooled(of_some_ND, some))
                states.append(of_some_ND)
        alone_ND = torch.cat(states)
        own, own_alone = (torch.from_numpy(own_places(rows)) for rows in (student, alone))
        states_ND = alone_ND.new_zeros((len(student.ids), alone_ND.shape[1]))
        states_ND[own] = alone_ND[own_alone]
        return Lesson(
            rows=student,
            vectors_MD=F.normalize(torch.cat(means), dim=1),
            states_ND=states_ND,
            is_taught_N=torch.zeros(len(student.ids)).index_fill_(0, own, 1.0),
        )

    def _embed(self, part: Rows, lesson: Lesson, tokens: slice, context_CD: torch.Tensor | None) -> Embedded:
        """Return the landmark states of some rows, and each token's distance from the base's."""
        with autocast(self.model, self.config):
            x_ND = self.model.states(part, context_CD)[self.model.num_layers]
        distance_N = 1.0 - F.cosine_similarity(x_ND.float(), lesson.states_ND[tokens])
        return F.normalize(pooled(x_ND, part), dim=1), distance_N[:, None]

    def _loss(self, lesson: Lesson, measured: dict[str, float], embedded: Embedded) -> torch.Tensor:
        s_MD, distance_N1 = embedded
        y_MD, is_taught_N = lesson.vectors_MD, lesson.is_taught_N
        followed = (1.0 - (s_MD * y_MD).sum(1)).mean()
        geometry = (s_MD @ s_MD.T - y_MD @ y_MD.T).square().mean()
        tokens = (distance_N1[:, 0] * is_taught_N).sum() / is_taught_N.sum()
        measured.update(
            cosine=1.0 - followed.item(), token_cosine=1.0 - tokens.item(), geometry=geometry.item()
        )
        return followed + geometry + self.config.token_weight * tokens


def train_landmarks(
    base: str,
    sources: Sequence[Path],
    folder: Path,
    config: LandmarkConfig,
    *,
    judged: Sequence[Path] = (),
    stop_after_seconds: float | None = None,
    progress: ProgressListener = silent_progress,
) -> RunReport:
    """Train the landmark states of ``base`` on the texts of ``sources``; leave the run in ``folder``."""
    deadline = deadline_in(stop_after_seconds)
    config = resolved(config)
    checkpoint, settings = read_checkpoint(model_folder(base)), encoder_config({"model": base})
    _require_base(checkpoint, settings)
    model = LandmarkEncoder(checkpoint)
    if config.window_tokens > model.max_positions:
        raise ConfigError(
            f"window_tokens must be at most the base's {model.max_positions} positions, got "
            f"{config.window_tokens}"
        )
    model.freeze_embeddings()
    read = read_windows(sources, config.window_tokens, judged)
    num_heldout = min(config.heldout_windows, len(read.windows) // 10)
    served = EncoderConfig(
        model=base,
        pooling="lmk",
        attention="full",
        window_tokens=config.window_tokens,
        landmark_interval=config.served_interval,
        title_tokens=config.title_tokens if config.title_share else 0,
    )
    made_of, device = {"base": checkpoint.fingerprint, "texts": read.fingerprint}, default_device()
    with claimed_folder(folder, config, made_of, read.skipped):
        objective = FollowedChunks(
            model=model.to(device),
            base=LandmarkEncoder(checkpoint).requires_grad_(False).to(device),
            checkpoint=checkpoint,
            windows=read.windows,
            num_heldout=num_heldout,
            config=config,
            folder=EncoderFolder(base=checkpoint, settings=served),
        )
        report = Trainer(
            objective=objective, config=config, folder=folder, deadline=deadline, progress=progress
        ).run()
        objective.folder.save_changes(folder, model)
    details = {
        "windows": len(read.windows),
        "heldout_windows": num_heldout,
        "tokens_per_second": report.rate("num_tokens"),
    }
    return replace(report, skipped=read.skipped, details=details)


def _require_base(checkpoint: Checkpoint, settings: EncoderConfig) -> None:
    if not is_plain(checkpoint):
        raise ModelError(
            "landmarks must be trained on a transformer of one stage without dense layers and a landmark "
            "mixer, got another; train its base"
        )
    if settings.pooling != "mean" or settings.causal or settings.document_prefix:
        raise ModelError(
            "landmarks must follow a base that pools the mean of all tokens, without a causal mask and a "
            f"document prefix, got pooling {settings.pooling}; choose another"
        )
