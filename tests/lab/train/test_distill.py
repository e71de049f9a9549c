"""A student follows its teacher: losses, layers, what is drawn, kills, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.compress.compression import compress
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.lab.train.distill import (
    FITTED_TEXTS,
    _compare,
    distill,
    fitted_positions,
    laid_onto,
    num_left_out,
    text_row,
    whole_text_encoder,
)
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import apart
from cairn.pipeline.lab.train.pairs import read_texts
from cairn.pipeline.lab.train.settings import DistillConfig
from cairn.pipeline.lab.train.trainer import RunReport
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config, settings_of_a_folder
from cairn.pipeline.token_vectors.projection import unit
from safetensors.numpy import load_file as load_numpy

from tests.encode.sentence_transformers_folders import write_dense
from tests.lab.train.conftest import DISTILL, tiny_new

WORDS = "the old cat sat on a mat by the river and walks a stone path"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    rows = [" ".join(generator.choice(WORDS.split(), int(generator.integers(4, 16)))) for _ in range(40)]
    pq.write_table(pa.table({"text": rows}), path)
    return path


@pytest.fixture(scope="module")
def student(tiny_model_folder, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "small"
    compress(str(tiny_model_folder), [texts], folder, CompressConfig(layers=1))
    return str(folder)


@pytest.fixture
def run(tiny_model_folder: Path, student: str, texts: Path, tmp_path: Path) -> Callable[..., RunReport]:
    """Return what distills the tiny model, or another teacher, into the student, or another one."""

    def start(
        teacher: Path | str = tiny_model_folder,
        into: Path | str = student,
        sources: Path = texts,
        name: str = "run",
        **settings: Any,
    ) -> RunReport:
        return distill(
            str(teacher), str(into), [sources], tmp_path / name, DistillConfig(**{**DISTILL, **settings})
        )

    return start


def logged(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def served_as(folder: Path | str, copy: Path, **settings: Any) -> str:
    shutil.copytree(folder, copy)
    described = settings_of_a_folder(EncoderConfig(model=str(folder), **settings))
    (copy / "cairn_config.json").write_text(json.dumps(described))
    return str(copy)


def test_pruned_student_comes_nearer_to_its_teacher(run, tmp_path):
    report = run(steps=30, evaluate_every=30)
    before, after = logged(tmp_path / "run", "heldout_cosine")
    assert report.details["follows"] == "hidden states and vectors"
    assert 1 - after < 0.6 * (1 - before)
    assert report.last_loss < 0.6 * report.first_loss


@pytest.mark.parametrize(("state_weight", "rtol"), [(0.0, 1e-5), (1.0, 0.1)])
def test_micro_batches_move_only_rounding_and_the_scale_of_states(run, tmp_path, state_weight, rtol):
    for name, tokens in (("whole", 10_000), ("cut", 40)):
        run(name=name, steps=2, micro_batch_tokens=tokens, state_weight=state_weight)
    whole, cut = (logged(tmp_path / name, "loss") for name in ("whole", "cut"))
    np.testing.assert_allclose(whole[0], cut[0], rtol=rtol)


def test_teacher_of_another_width_is_followed_by_its_vectors(make_bert, model_size, run, student, tmp_path):
    teacher = make_bert(model_size(width=48))
    narrow = served_as(student, tmp_path / "student", dims=8)
    for name, into in (("run", student), ("narrow", narrow)):
        report = run(teacher, into, name=name, steps=20, evaluate_every=20)
        assert report.details["follows"] == "vectors"
        assert report.last_loss < 0.9 * report.first_loss
    with pytest.raises(ConfigError, match="state_weight must be 0 with a teacher of another tokenizer"):
        run(teacher, name="other", state_weight=1.0)


@pytest.mark.parametrize(
    "settings", [{"pooling": "cls"}, {"pooling": "lmk"}, {"document_prefix": "river: "}], ids=str
)
def test_teacher_read_or_pooled_otherwise_is_followed_by_the_vectors_it_serves(
    tiny_model_folder, run, texts, tmp_path, settings
):
    teacher = served_as(tiny_model_folder, tmp_path / "teacher", **settings)
    assert run(teacher).details["follows"] == "vectors"
    found = load_numpy(tmp_path / "run" / "teacher.safetensors")["vectors"]
    encoder = DocumentEncoder(encoder_config({"model": teacher}))
    served_NV = encoder.encode(read_texts([texts]).texts).document_vectors_NV
    # A rotation into the student's space keeps what vectors say of one another.
    np.testing.assert_allclose(found @ found.T, served_NV @ served_NV.T, atol=1e-4)


def test_states_are_followed_of_a_teacher_that_reads_and_pools_as_the_student(
    make_folder, tiny_model_folder, student, tmp_path
):
    def compares(*folders: Path | str) -> bool:
        sides = [(read_checkpoint(Path(each)), encoder_config({"model": str(each)})) for each in folders]
        return _compare(*sides[0], *sides[1])

    decoder = tmp_path / "decoder"
    save_encoder_folder(decoder, tiny_new("qwen3", tiny_model_folder), EncoderConfig())
    assert compares(make_folder(modules=[]), student)
    assert compares(decoder, decoder)
    assert not compares(served_as(decoder, tmp_path / "teacher", causal=True), decoder)


def test_teachers_with_dense_layers_and_of_two_stages_are_followed_by_their_vectors(
    make_folder, make_cde, run
):
    dense = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(dense / "2_Dense", 24, 32)
    for name, teacher in (("dense", dense), ("cde", make_cde(1))):
        assert run(teacher, name=name).details["follows"] == "vectors"


@pytest.mark.parametrize("pool_prefix", [False, True])
def test_student_is_trained_on_the_vector_it_serves(tiny_model_folder, texts, tmp_path, pool_prefix):
    folder = served_as(
        tiny_model_folder, tmp_path / "model", document_prefix="river: ", pool_prefix=pool_prefix
    )
    checkpoint, settings = read_checkpoint(Path(folder)), encoder_config({"model": folder})
    some = read_texts([texts]).texts[:5]
    rows = [text_row(text, checkpoint, max_tokens=64, prefix=settings.document_prefix) for text in some]
    lengths = np.array(list(map(len, rows)))
    ids = np.concatenate(rows).astype(np.int32)
    packed = apart(ids, lengths, num_left_out(checkpoint, settings))
    with torch.no_grad():
        trained = torch.nn.functional.normalize(LandmarkEncoder(checkpoint)(packed)).numpy()
    served = DocumentEncoder(replace(settings, precision="fp32")).encode(some).document_vectors_NV
    np.testing.assert_allclose(trained, served, atol=1e-5)


def test_prefix_shared_with_the_teacher_is_read_and_kept(tiny_model_folder, student, run, tmp_path):
    same = {"document_prefix": "river: "}
    teacher = served_as(tiny_model_folder, tmp_path / "teacher", **same)
    report = run(teacher, served_as(student, tmp_path / "student", **same))
    assert report.details["follows"] == "hidden states and vectors"
    assert encoder_config({"model": str(tmp_path / "run" / "model")}).document_prefix == "river: "
    assert report.first_loss != pytest.approx(run(name="plain").first_loss, rel=1e-3)


def test_student_that_is_served_otherwise_long_texts_and_too_few_are_refused(
    make_cde, student, run, tmp_path
):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": f"cat {number}"}) + "\n" for number in range(9)))
    landmark = served_as(student, tmp_path / "landmark", pooling="lmk")
    prefixed = served_as(student, tmp_path / "prefixed", document_prefix="river " * 22)
    for how, error, sentence in (
        ({"into": landmark}, ModelError, "must pool the mean of all tokens .* got pooling lmk"),
        ({"into": prefixed}, ConfigError, "max_tokens must be at least 25 .* got 24"),
        ({"into": make_cde(1)}, ModelError, "a student must be a transformer of one stage"),
        ({"max_tokens": 500}, ConfigError, "max_tokens must be at most the models' 96 positions, got 500"),
        ({"sources": few}, SourceError, "at least 10 different texts, got 9"),
    ):
        with pytest.raises(error, match=sentence):
            run(**how)
    with pytest.raises(ConfigError, match=r"the teacher cannot be loaded: .*got 'org/none'"):
        whole_text_encoder("org/none")


def vectors_of(num_texts: int, width: int, rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return unit((rng.normal(size=(num_texts, rank)) @ rng.normal(size=(rank, width))).astype(np.float32))


@pytest.mark.parametrize(("width", "rank"), [(8, 8), (5, 5), (24, 8)], ids=["equal", "narrower", "wider"])
def test_scores_of_a_teacher_stay_in_the_width_of_the_student(width, rank):
    taught = vectors_of(60, width, rank)
    own = vectors_of(60, 8, 8, seed=1)
    laid = laid_onto(taught, own)
    assert laid.shape == (60, 8)
    np.testing.assert_allclose(laid @ laid.T, taught @ taught.T, atol=1e-4)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(8, 8)))
    np.testing.assert_allclose(laid_onto((own @ turn).astype(np.float32), own), own, atol=1e-4)
    positions = fitted_positions(3 * FITTED_TEXTS + 1)  # of texts spread over all
    assert (positions[0], len(positions) <= FITTED_TEXTS) == (0, True)
    assert positions[-1] > 2.9 * FITTED_TEXTS
