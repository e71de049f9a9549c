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

A document's other windows may read the landmarks of its first as input vectors (CDE, eq. 5 and 6). The
student makes them as it is, and they get no gradient. What such a window follows was read behind the title,
also where the window shows none.

Source: landmarks and their windows are those of LMK pooling (algorithm 1, variable granularity); following a
model's own pooled vectors is a way of our own, after the self-distillation of Furlanello et al. 2018.

    N tokens of a batch    M landmarks of it    C landmarks that are read    D width
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.distill import is_plain
from cairn.pipeline.lab.train.gradients import Embedded, SecondStage, cached_backward
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder, Lead, autocast, resolved
from cairn.pipeline.lab.train.leakage import read_judged_texts
from cairn.pipeline.lab.train.packed_rows import own_places, pooled, split
from cairn.pipeline.lab.train.pairs import counted, read_rows, training_files
from cairn.pipeline.lab.train.settings import LandmarkConfig
from cairn.pipeline.lab.train.trainer import (
    RunReport,
    Score,
    Trainer,
    TrainingBatch,
    claimed_folder,
    places_of_step,
)
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.precision import default_device
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES
from cairn.pipeline.model.landmarks import Chunks, Rows, lay_out, split_into_chunks
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float32, Int32, Int64

CHARACTERS_PER_TOKEN: Final = 4
"""So long is a window's text for each of its tokens; what its tokens do not hold is left out."""

_BATCHES, _DRAWN = 41, 42
"""What is drawn, as part of its seed."""

_SPACE: Final = re.compile(r"\s")
NEIGHBOURS: Final = 4
"""Windows side by side that are drawn together where a document's others are read."""


class Window(NamedTuple):
    """A stretch of a document, with the document's title; a query is one without a title.

    ``lead`` is the place of its document's first window among all windows, -1 where it is that one.
    """

    title: str
    text: str
    lead: int = -1


def read_windows(
    paths: Sequence[Path], window_tokens: int, judged: Sequence[Path] = ()
) -> tuple[list[Window], dict[str, int]]:
    """Cut the documents of :func:`read_documents` into windows, all of one document side by side."""
    documents, skipped = read_documents(paths, judged)
    room = CHARACTERS_PER_TOKEN * window_tokens
    windows: list[Window] = []
    for one in documents:
        first, start = len(windows), 0
        for part in _parts(one.text, room):
            lead = first if start else -1
            windows.append(Window(one.title, part, lead))
            start += len(part)
    return windows, skipped


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
    """Yield a file's documents and queries; what stands twice in a document stands there once."""
    title, parts = "", dict[str, None]()
    columns = ("title", "text", "document", "query")
    for of_row, text, document, query in read_rows(file, columns):
        if query.strip():
            yield Window("", query.strip())
        if parts and (not of_row or of_row != title):
            yield Window(title, "\n\n".join(parts))
            parts = {}
        title = of_row.strip()
        parts[text or document] = None
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


class _Row(NamedTuple):
    """A window in tokens: those of its title, empty where it shows none, and of its chunks."""

    title: Int32[np.ndarray, " _"]
    chunks: Sequence[Int32[np.ndarray, " _"]]
    unread: Int32[np.ndarray, " _"]
    """The title, whether it is shown or not."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lesson:
    """Rows of a batch as the student reads them, each landmark pooled by itself, and what it is to follow.

    Row r reads the landmarks ``read_by_row[r]`` of all those of ``leads``, the first windows of documents.
    """

    rows: Rows
    leads: Rows | None
    read_by_row: Sequence[Int64[np.ndarray, " _"]]
    vectors_MD: Float32[torch.Tensor, "M D"]
    states_ND: Float32[torch.Tensor, "N D"]
    is_taught_N: Float32[torch.Tensor, " N"]
    """1 for tokens of chunks and titles, 0 for [CLS] and landmarks."""

    @property
    def is_reader_M(self) -> Bool[torch.Tensor, " M"]:  # noqa: N802 - the shape's suffix
        """Mark the landmarks of rows that read a lead."""
        reads_B = np.array([len(read) > 0 for read in self.read_by_row])
        return torch.from_numpy(reads_B[self.rows.pooled_row]).to(self.vectors_MD.device)


LeadKind = Literal["own", "foreign", "none"]


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

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`Objective`."""
        generator = np.random.default_rng([self.config.seed, _DRAWN, step])
        config, num_trained = self.config, len(self.windows) - self.num_heldout
        together = NEIGHBOURS if config.document_context else 1
        drawn = (max(1, config.batch_windows // together), max(1, num_trained // together))
        places = places_of_step(step, *drawn, config.seed, _BATCHES)
        near = np.minimum(together * places[:, None] + np.arange(together), num_trained - 1)
        lesson = self.lesson([self.windows[place] for place in near.ravel().tolist()], generator)
        measured: dict[str, float] = {}
        return TrainingBatch(
            backward=lambda: cached_backward(
                (), self._stages(lesson, "own"), partial(self._loss, lesson, measured)
            ),
            report=lambda: {
                **measured,
                "num_landmarks": len(lesson.vectors_MD),
                "num_tokens": len(lesson.rows.ids),
            },
        )

    @torch.no_grad()
    def score(self) -> Score | None:
        """See :class:`Objective`: the mean cosine of held-out landmarks with what they follow.

        With a document's context it is told of the landmarks that read one, too, behind their own document's,
        a foreign one's and none.
        """
        if not self.num_heldout:
            return None
        kinds: Sequence[LeadKind] = ("own", "foreign", "none") if self.config.document_context else ("own",)
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        for kind, lesson in product(kinds, self._heldout):
            s_MD, distance_N1 = self.landmarks(lesson, kind)
            cosine_M = F.cosine_similarity(s_MD, lesson.vectors_MD)
            if kind == "own":
                found["heldout_cosine"].append(cosine_M)
                found["heldout_token_cosine"].append(1.0 - distance_N1[lesson.is_taught_N > 0, 0])
            found[f"heldout_cosine_behind_{kind}"].append(cosine_M[lesson.is_reader_M])
        whole = {name: torch.cat(values) for name, values in found.items()}
        measures = {name: float(values.mean()) for name, values in whole.items() if len(values)}
        measures["heldout_cosine_p5"] = float(whole["heldout_cosine"].quantile(0.05))
        return Score(measures=measures, value=measures["heldout_cosine"])

    def landmarks(self, lesson: Lesson, kind: LeadKind = "own") -> Embedded:
        """Return the landmarks of a lesson's rows, and each token's distance from the base's."""
        parts = [embed(None) for embed in self._stages(lesson, kind)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @cached_property
    def _heldout(self) -> tuple[Lesson, ...]:
        """Return the held-out windows with the middle interval, their titles shown.

        Beside a document's context every other one is shown: the context may stand for the title.
        """
        held = self.windows[len(self.windows) - self.num_heldout :]
        size = self.config.batch_windows
        groups = [held[start : start + size] for start in range(0, len(held), size)]
        return tuple(self.lesson(group, None) for group in groups)

    def _laid_out(self, windows: Sequence[Window], generator: np.random.Generator | None) -> list[_Row]:
        """Tokenise and cut windows, as many chunks as fit."""
        config, tokenizer = self.config, self.checkpoint.tokenizer
        if generator is None:
            interval_B = np.full(len(windows), config.served_interval)
            shows_B = (
                np.arange(len(windows)) % 2 == 0 if config.document_context else np.full(len(windows), True)
            )
        else:
            interval_B = generator.choice(np.array(config.landmark_intervals, np.int64), len(windows))
            shows_B = generator.random(len(windows)) < config.title_share
        texts = tokenize(tokenizer, [one.text for one in windows])
        titles = tokenize(tokenizer, [one.title for one in windows])
        chunks = split_into_chunks(texts.breaks, texts.text_offsets, interval_B)
        chunk_ids = np.split(texts.ids, chunks.token_offsets[1:-1])
        title_ids = np.split(titles.ids, titles.text_offsets[1:-1])
        room = config.window_tokens - (self.checkpoint.cls_id is not None)
        rows: list[_Row] = []
        for row, shows in enumerate(shows_B.tolist()):
            whole = title_ids[row][: config.title_tokens]
            title = whole[: len(whole) * shows]
            first, end = chunks.chunk_offsets[row : row + 2].tolist()
            lengths = [len(ids) + 1 for ids in chunk_ids[first:end]]
            fill = np.cumsum(lengths) + (len(title) + 1) * bool(len(title))
            end = first + max(1, int(np.searchsorted(fill, room, side="right")))
            rows.append(_Row(title, chunk_ids[first:end], whole))
        return rows

    def _leads(
        self, windows: Sequence[Window], generator: np.random.Generator | None
    ) -> tuple[Rows | None, list[Int64[np.ndarray, " _"]]]:
        """Return the first windows of documents, and which of their landmarks each window reads, as drawn."""
        config, none = self.config, np.zeros(0, np.int64)
        most, reads_B = config.document_context, np.array([one.lead >= 0 for one in windows])
        if generator is not None and most:
            most = int(generator.integers(1, most + 1))
            reads_B &= generator.random(len(windows)) >= config.context_absence
        places = dict.fromkeys(one.lead for one, reads in zip(windows, reads_B, strict=True) if reads)
        if not most or not places:
            return None, [none] * len(windows)
        rows = self._laid_out([self.windows[place] for place in places], generator)
        parts, counts = [part for row in rows for part in row.chunks], [len(row.chunks) for row in rows]
        titles = [row.title for row in rows]
        laid = self._lay_out(parts, counts, attention="full", pooling="lmk", titles=titles)
        ends = np.cumsum(counts)
        of_place = dict(zip(places, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
        own = [of_place[one.lead] if reads else none for one, reads in zip(windows, reads_B, strict=True)]
        return laid, [(each if generator is None else generator.permutation(each))[:most] for each in own]

    def _lay_out(self, parts: Sequence[Int32[np.ndarray, " _"]], counts: Sequence[int], **how: Any) -> Rows:
        """Lay out texts of so many chunks each."""
        chunks = Chunks(
            token_offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
            chunk_offsets=np.concatenate([[0], np.cumsum(counts)]),
        )
        return lay_out(
            np.concatenate(parts),
            chunks,
            cls_id=self.checkpoint.cls_id,
            landmark_id=self.checkpoint.landmark_id,
            max_window_tokens=self.config.window_tokens,
            **how,
        )

    def lesson(self, windows: Sequence[Window], generator: np.random.Generator | None) -> Lesson:
        """Lay out windows and what they read as drawn, without a generator all of it, and ask the base.

        The base reads each title and each chunk alone, and what it makes of them is laid onto the rows. A row
        that reads its document's context follows chunks behind the title, whether it shows it or not.
        """
        rows = self._laid_out(windows, generator)
        leads, read_by_row = self._leads(windows, generator)
        shown = [[row.title, *row.chunks] if len(row.title) else row.chunks for row in rows]
        parts = [part for row in shown for part in row]
        # What each part is read behind alone: its title, of a title nothing.
        title_M: list[np.ndarray] = []
        for row, read in zip(rows, read_by_row, strict=True):
            title_M += [row.title[:0]] * bool(len(row.title))
            title_M += [row.unread if len(read) else row.title] * len(row.chunks)
        counts = [len(row) for row in shown]
        student = self._lay_out(parts, counts, attention="full", pooling="lmk")
        alone = self._lay_out(
            parts, counts, attention="chunk", pooling="mean", titles=title_M, are_of_chunks=True
        )
        means, states = list[torch.Tensor](), list[torch.Tensor]()
        with torch.no_grad(), autocast(self.base, self.config):
            for some in split(alone, self.config.micro_batch_tokens):
                of_some_ND = self.base.states(some)[self.base.num_layers].float()
                means.append(pooled(of_some_ND, some))
                states.append(of_some_ND)
        alone_ND = torch.cat(states)
        own, own_alone = (torch.from_numpy(own_places(each)) for each in (student, alone))
        states_ND = alone_ND.new_zeros((len(student.ids), alone_ND.shape[1]))
        states_ND[own] = alone_ND[own_alone]
        return Lesson(
            rows=student,
            leads=leads,
            read_by_row=read_by_row,
            vectors_MD=F.normalize(torch.cat(means), dim=1),
            states_ND=states_ND,
            is_taught_N=states_ND.new_zeros(len(student.ids)).index_fill_(0, own.to(states_ND.device), 1.0),
        )

    def _stages(self, lesson: Lesson, kind: LeadKind) -> list[SecondStage]:
        """Return what embeds each micro-batch: landmark states, and each token's distance from the base's.

        What rows read of their documents' first windows is made by the student as it is, without a gradient.
        """
        read_by_row, made_CD = lesson.read_by_row, torch.zeros((0, self.model.model_dim))
        if lesson.leads is None or kind == "none":
            read_by_row = [read[:0] for read in read_by_row]
        else:
            with torch.no_grad(), autocast(self.model, self.config):
                made_CD = torch.cat(
                    [
                        pooled(self.model.states(part)[self.model.num_layers], part)
                        for part in split(lesson.leads, self.config.micro_batch_tokens)
                    ]
                )
            if kind == "foreign":
                made_CD = made_CD.roll(len(made_CD) // 2, 0)
        stages: list[SecondStage] = []
        row = token = 0
        for part in split(lesson.rows, self.config.micro_batch_tokens):
            read = read_by_row[row : row + len(part)]
            lead = Lead(
                vectors_CD=made_CD[torch.from_numpy(np.concatenate(read))],
                counts_B=np.array([len(each) for each in read]),
            )
            stages.append(partial(self._embed, part, lesson.states_ND[token : token + len(part.ids)], lead))
            row, token = row + len(part), token + len(part.ids)
        return stages

    def _embed(self, part: Rows, states_ND: torch.Tensor, lead: Lead, _: torch.Tensor | None) -> Embedded:
        with autocast(self.model, self.config):
            x_ND = self.model.states(part, lead)[self.model.num_layers]
        distance_N = 1.0 - F.cosine_similarity(x_ND.float(), states_ND)
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
    student: str | None = None,
    judged: Sequence[Path] = (),
    deadline: float = math.inf,
    progress: ProgressListener = silent_progress,
) -> RunReport:
    """Train the landmark states of ``base`` on the texts of ``sources``; leave the run in ``folder``.

    ``student`` names other first weights of the same model, such as those of an earlier run.
    """
    config = resolved(config)
    checkpoint, settings = read_checkpoint(model_folder(base)), encoder_config({"model": base})
    _require_base(checkpoint, settings)
    begun = checkpoint if student is None else read_checkpoint(model_folder(student))
    model, teacher = LandmarkEncoder(begun), LandmarkEncoder(checkpoint)
    _require_kin(begun, model, teacher)
    if config.window_tokens > model.max_positions:
        raise ConfigError(
            f"window_tokens must be at most the base's {model.max_positions} positions, got "
            f"{config.window_tokens}"
        )
    model.freeze_embeddings()
    windows, skipped = read_windows(sources, config.window_tokens, judged)
    num_heldout = min(config.heldout_windows, len(windows) // 10)
    served = EncoderConfig(
        model=base,
        pooling="lmk",
        attention="full",
        window_tokens=config.window_tokens,
        landmark_interval=config.served_interval,
        title_tokens=config.title_tokens if config.title_share else 0,
        document_context=config.document_context,
    )
    texts, device = fingerprint(windows=[list(one) for one in windows]), default_device()
    made_of = {"base": checkpoint.fingerprint, "texts": texts}
    made_of |= {} if student is None else {"student": begun.fingerprint}
    with claimed_folder(folder, config, made_of, skipped):
        objective = FollowedChunks(
            model=model.to(device),
            base=teacher.requires_grad_(False).to(device),
            checkpoint=checkpoint,
            windows=windows,
            num_heldout=num_heldout,
            config=config,
            folder=EncoderFolder(base=checkpoint, settings=served),
        )
        report = Trainer(
            objective=objective, config=config, folder=folder, deadline=deadline, progress=progress
        ).run()
        objective.folder.save_changes(folder, model)
    details = {
        "windows": len(windows),
        "heldout_windows": num_heldout,
        "tokens_per_second": report.rate("num_tokens"),
    }
    return replace(report, skipped=skipped, details=details)


def _require_kin(student: Checkpoint, model: LandmarkEncoder, base: LandmarkEncoder) -> None:
    """Require weights of one architecture and tokenizer, and nothing beside them."""
    shapes = [{name: own.shape for name, own in each.named_parameters()} for each in (model, base)]
    if shapes[0] != shapes[1] or any(name.startswith(OWN_PREFIXES) for name in student.tensors):
        raise ModelError(
            "a student must have the weights of its base's architecture and no others, got another; name a "
            "model that was trained from this base"
        )


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
