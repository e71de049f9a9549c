"""Landmarks follow the base: layout, targets, data, gradients, resumption, serving, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.landmark_distillation import (
    FollowedChunks,
    LeadKind,
    Window,
    read_windows,
    train_landmarks,
)
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder
from cairn.pipeline.lab.train.settings import LandmarkConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.lab.evaluate.conftest import write_set
from tests.lab.train.conftest import LANDMARKS
from tests.tiny_models import TINY_WORDS

PLAIN_WORDS = [word for word in TINY_WORDS if not word.startswith("##")]


def words(count: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(PLAIN_WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    rows = [{"title": words(1 + n % 3, 1000 + n), "text": words(10 + 7 * n % 60, n)} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def make_objective(tiny_model_folder: Path) -> Callable[..., FollowedChunks]:
    checkpoint = read_checkpoint(tiny_model_folder)

    def make(windows: list[Window], **settings: Any) -> FollowedChunks:
        model = LandmarkEncoder(checkpoint)
        model.freeze_embeddings()
        served = EncoderConfig(
            model=str(tiny_model_folder),
            pooling="lmk",
            attention="full",
            window_tokens=64,
            landmark_interval=12,
        )
        return FollowedChunks(
            model=model,
            base=LandmarkEncoder(checkpoint).requires_grad_(False),
            checkpoint=checkpoint,
            windows=windows,
            num_heldout=0,
            config=LandmarkConfig(**LANDMARKS | settings),
            folder=EncoderFolder(base=checkpoint, settings=served),
        )

    return make


@pytest.fixture
def windows() -> list[Window]:
    return [Window(words(2, 90), words(30, 1)), Window("", words(5, 2)), Window(words(9, 91), words(40, 3))]


def document() -> list[Window]:
    """Return four windows of one document and one of another."""
    own = [Window("", words(48, 20 + place), 0 if place else -1) for place in range(4)]
    return [*own, Window(words(2, 32), words(20, 33))]


def test_rows_are_cls_title_and_chunks_with_a_landmark_behind_each(
    make_objective: Callable[..., FollowedChunks], windows: list[Window]
):
    objective = make_objective(windows)
    cls, mark = objective.checkpoint.cls_id, objective.checkpoint.landmark_id
    lesson = objective.lesson(windows, None)
    rows = np.split(lesson.rows.ids, np.cumsum(lesson.rows.lengths)[:-1])

    def ids(text: str) -> list[int]:
        return objective.checkpoint.tokenizer.encode(text, add_special_tokens=False).ids

    first = ids(windows[0].text)
    chunks = [first[start : start + 12] for start in range(0, len(first), 12)]
    assert rows[0].tolist() == [cls, *ids(windows[0].title), mark, *(t for z in chunks for t in (*z, mark))]
    assert rows[1].tolist() == [cls, *ids(windows[1].text), mark]
    assert rows[2].tolist()[1:6] == [*ids(windows[2].title)[:4], mark], "a title is cut to title_tokens"
    is_mark = lesson.rows.ids == mark
    places = (np.cumsum(lesson.rows.lengths) - lesson.rows.lengths)[lesson.rows.pooled_row]
    assert np.array_equal(np.flatnonzero(is_mark), places + lesson.rows.pooled_start)
    assert np.array_equal(lesson.is_taught_N.numpy() > 0, ~is_mark & (lesson.rows.ids != cls))


@pytest.mark.parametrize(("title_share", "reads"), [(1.0, False), (0.0, False), (0.0, True)])
def test_a_landmark_follows_its_chunk_behind_the_title(
    make_objective: Callable[..., FollowedChunks], tiny_model_folder: Path, title_share: float, reads: bool
):
    """The oracle: what the serving encoder makes of each chunk behind the title, and of the title alone.

    A window that does not show its title follows chunks alone, but for one that reads its document's first.
    """
    title, text = words(2, 90), words(30, 1)
    windows = [Window(title, words(9, 2)), Window(title, text, 0 if reads else -1)]
    drawn = {"title_share": title_share, "landmark_intervals": (12,), "context_absence": 0.0}
    objective = make_objective(windows, document_context=3 if reads else 0, **drawn)
    lesson = objective.lesson(windows[1:], np.random.default_rng(0))
    settings = EncoderConfig(model=str(tiny_model_folder), landmark_interval=12, precision="fp32")
    behind = replace(settings, title_tokens=4 if title_share or reads else 0)
    expected = DocumentEncoder(behind).encode([text], titles=[title]).chunk_vectors_MV
    assert len(expected) == 3
    if title_share:
        of_title = DocumentEncoder(settings).encode([title]).document_vectors_NV
        expected = np.concatenate([of_title, expected])

    np.testing.assert_allclose(lesson.vectors_MD, expected, atol=2e-5)


def test_tokens_follow_their_states_in_the_chunk_alone(
    make_objective: Callable[..., FollowedChunks], windows: list[Window]
):
    """An untrained student reads a window of one chunk as the base does, so nothing is left to follow."""
    objective = make_objective(windows, title_share=0.0)
    lesson = objective.lesson(windows[1:2], np.random.default_rng(0))
    _, distance_N1 = objective.landmarks(lesson)

    assert distance_N1[lesson.is_taught_N > 0].max() < 1e-5
    assert (lesson.states_ND[lesson.is_taught_N == 0] == 0).all()


@pytest.mark.parametrize("of_documents", [False, True])
def test_gradients_do_not_depend_on_micro_batches(
    make_objective: Callable[..., FollowedChunks], windows: list[Window], of_documents: bool
):
    settings = {"document_context": 3} if of_documents else {}

    def gradient(micro_batch_tokens: int) -> tuple[float, torch.Tensor]:
        objective = make_objective(
            document() if of_documents else windows, micro_batch_tokens=micro_batch_tokens, **settings
        )
        loss = objective.batch(0).backward()
        parts = [each.grad.flatten() for each in objective.model.parameters() if each.grad is not None]
        return float(loss), torch.cat(parts)

    (whole, of_whole), (parted, of_parts) = gradient(10_000), gradient(1)

    assert whole == pytest.approx(parted, rel=1e-5)
    torch.testing.assert_close(of_whole, of_parts, atol=1e-5, rtol=1e-3)


def test_windows_do_not_depend_on_the_order_of_rows_and_files(tmp_path: Path):
    rows = [{"title": "", "text": words(30, n)} for n in range(12)]
    for name, some in (("a", rows[:5]), ("b", rows[5:])):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "all.parquet")

    parted = read_windows([tmp_path / "a.parquet", tmp_path / "b.parquet"], 16)[0]
    assert parted == read_windows([tmp_path / "all.parquet"], 16)[0]
    assert {one.text for one in parted} != {row["text"] for row in rows}, "long texts are cut"
    joined = " ".join(one.text for one in parted)
    assert sorted(joined.split()) == sorted(" ".join(row["text"] for row in rows).split())


def test_neighbouring_pairs_with_one_title_are_one_document(tmp_path: Path):
    rows = [
        {"query": "the old way", "document": "a cat", "title": "cat"},
        {"query": "the old path", "document": "sat on", "title": "cat"},
        {"query": "", "document": "a cat", "title": "cat"},
        {"query": "", "document": "a mat", "title": ""},
        {"query": "", "document": "a river", "title": ""},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")

    assert set(read_windows([tmp_path / "pairs.parquet"], 64)[0]) == {
        Window("cat", "a cat\n\nsat on"),
        Window("", "a mat"),
        Window("", "a river"),
        Window("", "the old way"),
        Window("", "the old path"),
    }


def test_texts_of_judged_sets_are_left_out_and_counted(tmp_path: Path):
    of_corpus, query = {"id": "d", "title": "", "text": "a cat sat"}, {"id": "q", "text": "old way"}
    judged = write_set(tmp_path / "judged", [of_corpus], [query])
    rows = [
        {"query": "old way", "document": "a river"},
        {"query": "", "document": "A cat, sat."},
        {"query": "", "document": " "},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")

    windows, skipped = read_windows([tmp_path / "pairs.parquet"], 64, [judged])

    assert [one.text for one in windows] == ["a river"]
    assert skipped == {"text of an evaluation set": 2, "empty text": 1}


def test_training_brings_landmarks_nearer(tiny_model_folder: Path, texts: Path, tmp_path: Path):
    config = LandmarkConfig(**LANDMARKS | {"steps": 30, "evaluate_every": 30})
    run = train_landmarks(str(tiny_model_folder), [texts], tmp_path / "run", config)
    assert run.best_step == 30, "the untrained landmarks were the best"


@pytest.mark.parametrize("most", [3, 16])
def test_a_document_is_served_with_the_vectors_that_training_has_behind_its_first_window(
    make_objective: Callable[..., FollowedChunks], tmp_path: Path, most: int
):
    windows = document()[:4]
    objective = make_objective(windows, document_context=most)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            if parameter.requires_grad:
                parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    objective.folder.save(tmp_path / "model", objective.model)
    lesson = objective.lesson(windows, None)
    with torch.no_grad():
        trained, foreign, alone = (objective.landmarks(lesson, kind)[0] for kind in get_args(LeadKind))
    settings = replace(
        objective.folder.settings,
        model=str(tmp_path / "model"),
        precision="fp32",
        window_overlap_tokens=0,
    )
    text = " ".join(window.text for window in windows)
    served, without = (
        DocumentEncoder(replace(settings, document_context=count)).encode([text]).chunk_vectors_MV
        for count in (most, 0)
    )

    np.testing.assert_allclose(served, trained, atol=1e-5)
    np.testing.assert_allclose(without, alone, atol=1e-5)
    assert np.abs(served - without)[4:].min(axis=0).max() > 1e-4, "the first window's landmarks are not read"
    assert (trained[:4] == alone[:4]).all(), "the first window reads something"
    assert not torch.allclose(trained[4:], foreign[4:], atol=1e-4) or most >= 4, (
        "order counts beyond its number"
    )


@pytest.mark.parametrize(
    "settings",
    [{"landmark_intervals": (4, 16)}, {"landmark_intervals": ()}, {"landmark_intervals": (64,)}],
    ids=["too short", "none", "too long"],
)
def test_intervals_must_fit(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="landmark_intervals must be at least 8 and fit"):
        LandmarkConfig(**LANDMARKS | settings)


def test_what_cannot_be_trained_is_refused(tiny_model_folder: Path, texts: Path, tmp_path: Path):
    config = LandmarkConfig(**LANDMARKS)
    with pytest.raises(ConfigError, match="at most the base's 96 positions, got 128"):
        train_landmarks(str(tiny_model_folder), [texts], tmp_path / "run", replace(config, window_tokens=128))
    with pytest.raises(ModelError, match="without dense layers and a landmark mixer"):
        train_landmarks("cairn-minilm", [texts], tmp_path / "run", config)
    with pytest.raises(SourceError, match=r"none\.parquet does not exist"):
        train_landmarks(str(tiny_model_folder), [tmp_path / "none.parquet"], tmp_path / "run", config)
