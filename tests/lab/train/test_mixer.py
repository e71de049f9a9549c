"""What a mixer makes in training is what the encoder makes of the same documents in an ingest."""

from __future__ import annotations

import errno
import json
import math
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
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, DiskFullError, ModelError, SourceError
from cairn.pipeline.lab.train import mixer as mixer_folder
from cairn.pipeline.lab.train.mixer import (
    Compared,
    CutVectors,
    Judgements,
    MixerReport,
    Rotation,
    RotationBatch,
    compare,
    fused_scores,
    hit_rate,
    judge,
    mix_batch,
    mixing_loss,
    passage_loss,
    passages_of,
    ranking_loss,
    save_mixer,
    score_mixer,
    train_mixer,
)
from cairn.pipeline.lab.train.mixer_data import BaseVectors, BatchMaker, MixerBatch, embed_sources, unit
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.lab.train.token_head import principal_rotation
from cairn.pipeline.lab.train.trainer import FrozenBaseRun, read_log
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import Base, context_config, encoder_config
from cairn.pipeline.model.landmark_mixer import LandmarkMixer, Stretches, read_landmark_mixer
from cairn.pipeline.types import silent_progress
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.tiny_models import TINY_WORDS

E = torch.eye(6)


def batch_of(
    x_SLD: torch.Tensor,
    document_SL: list[list[int]],
    query_QD: torch.Tensor,
    answers: list[int],
    sequences: list[int],
) -> MixerBatch:
    document = torch.tensor(document_SL)
    is_landmark = document >= 0
    x_SLD = x_SLD * is_landmark[..., None]
    owned = [x_SLD[document == answer].sum(0) for answer in answers]
    return MixerBatch(
        source="s",
        stretches=Stretches(
            x_SLD=x_SLD,
            is_landmark_SL=is_landmark,
            mean_SD=functional.normalize(x_SLD.sum(1), dim=-1),
            num_landmarks_S=is_landmark.sum(1).float(),
        ),
        document_SL=document,
        query_QD=query_QD,
        answer_Q=torch.tensor(answers),
        sequence_Q=torch.tensor(sequences),
        answer_QD=functional.normalize(torch.stack(owned), dim=-1),
        context_CD=None,
    )


@pytest.fixture
def batch() -> MixerBatch:
    """Return two sequences: documents 0, 0, 1, and document 2, nearly document 1, with a place left over."""
    near = functional.normalize(E[2] + 0.3 * E[5], dim=-1)
    x_SLD = torch.stack([torch.stack([E[0], E[1], E[2]]), torch.stack([near, E[4], E[4]])])
    return batch_of(x_SLD, [[0, 0, 1], [2, 3, -1]], torch.stack([E[0], E[2]]), [0, 1], [0, 0])


def test_passages_are_landmarks_then_pairs_of_neighbours(batch: MixerBatch):
    x_SLD = batch.stretches.x_SLD
    rows = [x_SLD[0, 0], x_SLD[0, 1], x_SLD[0, 2], x_SLD[1, 0], x_SLD[1, 1]]
    pairs = [x_SLD[0, 0] + x_SLD[0, 1], x_SLD[0, 1] + x_SLD[0, 2], x_SLD[1, 0] + x_SLD[1, 1]]
    expected = torch.stack([*rows, *(functional.normalize(pair, dim=-1) for pair in pairs)])
    torch.testing.assert_close(passages_of(x_SLD, batch), expected)


def test_judge_takes_passages_inside_the_answer_and_leaves_out_what_touches_it_or_looks_like_it(
    batch: MixerBatch,
):
    judged = judge(batch)
    #                                    landmarks 0 0 1 | 2 3   pairs 00 01 | 23
    assert judged.is_answer_QM.int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    # Query 1's answer has a near copy in the other sequence, and half of it stands in the pair 01.
    assert judged.is_left_out_QM.int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1, 0]]


def test_judge_leaves_out_sequences_that_look_like_the_answering_one():
    x_SLD = torch.stack([E[:1], functional.normalize(E[:1] + 0.2 * E[1:2], dim=-1), E[2:3]])
    judged = judge(batch_of(x_SLD, [[0], [1], [2]], E[:2], [0, 2], [0, 2]))
    assert judged.is_left_out_QS.int().tolist() == [[0, 1, 0], [0, 0, 0]]


def test_passage_loss_is_minus_log_of_the_answers_share():
    cosine_QM = torch.tensor([[0.9, 0.5, 0.8, 0.1], [0.2, 0.7, 0.3, 0.4]])
    is_answer = torch.tensor([[True, True, False, False], [False, False, True, False]])
    left_out = torch.tensor([[False, False, True, False], [False, False, False, False]])
    judged = Judgements(
        base=compare_nothing(),
        is_answer_QM=is_answer,
        is_left_out_QM=left_out,
        is_left_out_QS=torch.zeros(2, 1, dtype=torch.bool),
        sequence_Q=torch.zeros(2, dtype=torch.int64),
    )
    expected = []
    for cosines, answers, outs in zip(cosine_QM.tolist(), is_answer.tolist(), left_out.tolist(), strict=True):
        terms = [math.exp(cosine / 0.1) for cosine in cosines]
        right = sum(term for term, answer in zip(terms, answers, strict=True) if answer)
        expected.append(
            -math.log(right / sum(term for term, out in zip(terms, outs, strict=True) if not out))
        )
    assert passage_loss(cosine_QM, judged, 0.1).item() == pytest.approx(np.mean(expected), rel=1e-5)


def compare_nothing() -> Compared:
    return Compared(passage_QM=torch.zeros(2, 4), sequence_QS=torch.zeros(2, 1), best_QS=torch.zeros(2, 1))


def test_ranking_loss_is_nothing_for_the_same_ranking_and_kl_for_another():
    one, other = torch.tensor([[0.9, 0.1, 0.3]]), torch.tensor([[0.2, 0.5, 0.4]])
    assert ranking_loss(one, one, 0.05).item() == pytest.approx(0, abs=1e-6)
    p, q = (np.exp(np.array(cosines.tolist()[0]) / 0.2) for cosines in (other, one))
    p, q = p / p.sum(), q / q.sum()
    assert ranking_loss(one, other, 0.2).item() == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4)
    teacher = other.clone().requires_grad_()
    student = one.clone().requires_grad_()
    ranking_loss(student, teacher, 0.2).backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_compare_finds_the_best_landmark_of_a_sequence_and_no_padding(batch: MixerBatch):
    x_SLD = batch.stretches.x_SLD
    compared = compare(x_SLD, torch.stack([-E[0], E[2]]), batch)
    np.testing.assert_allclose(compared.best_QS[0], [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(compared.best_QS[1], [1.0, 1 / math.sqrt(1.09)], atol=1e-6)
    np.testing.assert_allclose(compared.sequence_QS[1, 0], 1 / math.sqrt(3), atol=1e-6)
    np.testing.assert_allclose(fused_scores(compared)[1, 0], (1 + 1 / math.sqrt(3)) / 2, atol=1e-6)


def test_hit_rate_counts_queries_whose_best_passage_answers_unless_it_is_left_out(batch: MixerBatch):
    judged = judge(batch)
    assert hit_rate(judged.base, judged) == 1.0
    # A near copy of the answer scores highest and does not count; the other query now finds a passage of
    # document 3.
    asked = torch.stack([E[4], functional.normalize(E[2] + 0.3 * E[5], dim=-1)])
    assert hit_rate(compare(batch.stretches.x_SLD, asked, batch), judged) == 0.5


def test_mixing_loss_of_closed_gates_is_the_base_models(make_paged_world: Callable[..., Any]):
    config = MixerConfig(batch_queries=24, context_documents=40, min_pairs=4)
    batch = BatchMaker(make_paged_world().data(config), config).training_batch(0)
    mixer = LandmarkMixer(32, 2, 8)
    y_SLD, query_QD = mix_batch(mixer, batch)
    is_landmark = batch.stretches.is_landmark_SL
    torch.testing.assert_close(y_SLD[is_landmark], batch.stretches.x_SLD[is_landmark])
    torch.testing.assert_close(query_QD, batch.query_QD)
    loss, terms = mixing_loss(mixer, batch, config)
    assert terms["hit"] == terms["base_hit"] < 0.5
    assert terms["ranking"] == pytest.approx(0, abs=1e-5)
    assert loss.item() == pytest.approx(
        terms["passages"] + 0.5 * terms["documents"] + 0.5 * terms["fused"], rel=1e-5
    )
    loss.backward()
    assert mixer.title_gate.grad is not None
    assert mixer.title_gate.grad.item() < 0  # opening it lowers the loss


CONFIG = MixerConfig(context_documents=40, hold_out=0.25, min_pairs=4)


@pytest.fixture
def maker(make_paged_world: Callable[..., Any]) -> BatchMaker:
    return BatchMaker(make_paged_world(sources=("a", "b")).data(CONFIG), CONFIG)


def test_score_mixer_says_how_often_answers_are_found(maker: BatchMaker):
    mixer = LandmarkMixer(32, 2, 8)
    before = score_mixer(mixer, maker, dims=(32,))[32]
    assert set(before) == {"heldout_score", "heldout_hit", "heldout_ndcg_at_10"}
    assert before["heldout_score"] == pytest.approx(
        (before["heldout_hit"] + before["heldout_ndcg_at_10"]) / 2
    )
    mixer.title_gate.data.fill_(1.0)
    after = score_mixer(mixer, maker, dims=(32,))[32]
    assert after["heldout_hit"] > before["heldout_hit"] + 0.2
    assert after["heldout_ndcg_at_10"] > before["heldout_ndcg_at_10"] + 0.1


def test_score_mixer_of_whole_vectors_does_not_feel_a_turn_and_cut_ones_do(maker: BatchMaker):
    mixer = LandmarkMixer(32, 2, 8)
    rotation_DD = torch.from_numpy(principal_rotation(maker.sample_vectors(200)))
    plain, turned = (
        score_mixer(mixer, maker, dims=(32, 8), rotation_DD=turn) for turn in (None, rotation_DD)
    )
    assert turned[32] == pytest.approx(plain[32])
    assert turned[8]["heldout_score"] != pytest.approx(plain[8]["heldout_score"])


def test_score_mixer_with_nothing_held_out_is_nothing(make_paged_world: Callable[..., Any]):
    config = replace(CONFIG, hold_out=0.0)
    assert (
        score_mixer(LandmarkMixer(32), BatchMaker(make_paged_world().data(config), config), dims=(32,)) == {}
    )


WIDTH, TELLING = 12, 3


def vectors(num: int, scale: np.ndarray, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num, len(scale))) * scale).astype(np.float32)


def test_principal_rotation_is_orthogonal_and_says_most_first():
    scale = np.array([0.1, 3.0, 1.0, 0.5])
    rotation_DD = principal_rotation(vectors(4_000, scale))
    np.testing.assert_allclose(rotation_DD @ rotation_DD.T, np.eye(4), atol=1e-6)
    assert np.abs(rotation_DD).argmax(0).tolist() == [1, 2, 3, 0]
    second_moments = ((vectors(4_000, scale) @ rotation_DD) ** 2).mean(0)
    assert (np.diff(second_moments) < 0).all()


def test_principal_rotation_does_not_centre():
    shifted = vectors(2_000, np.ones(3)) * 0.1 + np.array([0.0, 0.0, 5.0], np.float32)
    np.testing.assert_allclose(principal_rotation(shifted.astype(np.float32))[:, 0], [0, 0, 1], atol=1e-2)


def rotation_batch(step: int) -> RotationBatch:
    """Return queries whose answers agree with them in a few directions that carry little.

    The rest is large and says nothing.
    """
    generator = np.random.default_rng(step)
    telling = generator.normal(size=(16, TELLING))
    scale = np.concatenate([np.full(TELLING, 1.0), np.full(WIDTH - TELLING, 1.5)])

    def side() -> torch.Tensor:
        rest = generator.normal(size=(16, WIDTH - TELLING))
        return functional.normalize(
            torch.from_numpy((np.concatenate([telling, rest], axis=1) * scale).astype(np.float32)), dim=1
        )

    query_QD, passage_MD = side(), side()
    is_answer_QM = torch.eye(16, dtype=torch.bool)
    nothing = torch.zeros(16, 1)
    judged = Judgements(
        base=Compared(passage_QM=query_QD @ passage_MD.T, sequence_QS=nothing, best_QS=nothing),
        is_answer_QM=is_answer_QM,
        is_left_out_QM=torch.zeros_like(is_answer_QM),
        is_left_out_QS=torch.zeros(16, 1, dtype=torch.bool),
        sequence_Q=torch.zeros(16, dtype=torch.int64),
    )
    return query_QD, passage_MD, judged


def hits(rotation_DD: torch.Tensor, dim: int) -> float:
    found = []
    for step in range(1_000, 1_020):
        query_QD, passage_MD, _ = rotation_batch(step)
        cosine_QM = (
            functional.normalize((query_QD @ rotation_DD)[:, :dim], dim=1)
            @ functional.normalize((passage_MD @ rotation_DD)[:, :dim], dim=1).T
        )
        found.append(float((cosine_QM.argmax(1) == torch.arange(16)).float().mean()))
    return float(np.mean(found))


def test_rotation_stays_orthogonal_and_puts_what_finds_answers_first(tmp_path: Path):
    sample = np.concatenate([side.numpy() for step in range(50) for side in rotation_batch(step)[:2]])
    start_DD = torch.from_numpy(principal_rotation(sample))
    config = MixerConfig(rotation_steps=150, rotation_lr=0.05, temperature=0.1, distillation_temperature=0.2)
    objective = CutVectors(
        model=Rotation(start_DD), draw=rotation_batch, measure=lambda _: {}, dims=(4,), config=config
    )
    torch.testing.assert_close(objective.model.exact(), start_DD, atol=1e-6, rtol=0)
    FrozenBaseRun(tmp_path / "mixer").train(objective, config.of_rotation, silent_progress, stage="rotation")
    losses = [record["loss"] for record in read_log(tmp_path / "mixer.jsonl")]
    rotation_DD = objective.model.exact()
    assert rotation_DD.dtype == torch.float32
    torch.testing.assert_close(rotation_DD @ rotation_DD.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert len(losses) == 150
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    assert hits(rotation_DD, 4) > hits(start_DD, 4) + 0.1
    assert hits(rotation_DD, WIDTH) == pytest.approx(hits(start_DD, WIDTH))


@pytest.fixture
def base(tiny_model_folder: Path) -> Base:
    return Base(
        model=str(tiny_model_folder), weights_sha256=read_checkpoint(tiny_model_folder).weights_sha256
    )


def test_save_mixer_is_read_back_as_it_was(base: Base, tmp_path: Path):
    mixer = LandmarkMixer(32, 3, 5)
    settings = EncoderConfig(
        model=base.model, use_context=True, query_prefix="find", backend="torch", precision="fp32"
    )
    save_mixer(tmp_path / "deep" / "mixer", mixer, base, settings)
    read = read_landmark_mixer(read_checkpoint(tmp_path / "deep" / "mixer").tensors, 32, torch.device("cpu"))
    assert read is not None
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in mixer.state_dict().items())
    brought = encoder_config({"model": str(tmp_path / "deep" / "mixer")})
    assert (brought.use_context, brought.query_prefix, brought.precision) == (True, "find", "auto")


def test_save_mixer_on_a_full_disk_leaves_nothing(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mixer_folder.durable, "write_bytes", full)
    with pytest.raises(DiskFullError, match="no space left while saving the mixer"):
        save_mixer(tmp_path / "mixer", LandmarkMixer(32), base, EncoderConfig())
    assert list(tmp_path.iterdir()) == []


SETTINGS: dict[str, Any] = {
    "steps": 80,
    "num_heads": 2,
    "head_dim": 8,
    "batch_queries": 32,
    "context_documents": 40,
    "peak_lr": 2e-2,
    "warmup_steps": 10,
    "rotation_steps": 20,
    "rotation_lr": 1e-2,
    "evaluate_every": 40,
    "hold_out": 0.25,
    "min_pairs": 4,
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(world: Any, name: str = "mixer", **changed: Any) -> MixerReport:
    places = {key: changed.pop(key) for key in ("judged", "base", "cache") if key in changed}
    options = {"base": world.model, "cache": world.cache, "precision": "fp32", **places}
    return train_mixer(
        [world.file], world.file.parent / name, MixerConfig(**{**SETTINGS, **changed}), **options
    )


@pytest.mark.parametrize(
    ("clue", "settings"),
    [("title", {}), ("opening", {"grouped_share": 0.0, "title_absence": 1.0})],
    ids=["title", "rest of the document"],
)
def test_train_mixer_learns_what_a_section_does_not_say_by_itself(
    make_paged_world: Callable[..., Any], clue: str, settings: dict[str, Any]
):
    world = make_paged_world(clue=clue)
    report = run(world, **settings)
    records = read_log(world.file.parent / "mixer.jsonl")
    losses = [record["loss"] for record in records if "source" in record]
    assert len(losses) == 80
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    scored = {record["step"]: record for record in records if "heldout_hit" in record}
    assert list(scored) == [0, 40, 80]
    assert scored[report.best_step]["heldout_hit"] > scored[0]["heldout_hit"] + 0.2
    assert report.best_score == max(record["heldout_score"] for record in scored.values())
    assert report.base_score == scored[0]["heldout_score"]


def test_train_mixer_leaves_a_folder_that_gives_titles_to_landmarks(make_paged_world: Callable[..., Any]):
    world = make_paged_world()
    run(world, steps=10, rotation_steps=5)
    folder = world.file.parent / "mixer"
    assert {path.name for path in folder.iterdir()} == {"cairn_config.json", "cairn_extra.safetensors"}
    config = json.loads((folder / "cairn_config.json").read_text())
    assert config["base"]["model"] == world.model
    assert (config["encoder"]["use_context"], config["encoder"]["landmark_interval"]) == (True, 64)
    tensors = load_file(folder / "cairn_extra.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    rotation_DD = tensors["landmark_mixer.turn"]
    assert torch.allclose(rotation_DD @ rotation_DD.T, torch.eye(32), atol=1e-5)
    encoder = load_encoder(folder, use_context=False, precision="fp32")
    plain, titled = (
        encoder.encode_documents(["the old stone on the path"], titles=[title]) for title in (None, "river")
    )
    assert not np.allclose(plain, titled, atol=1e-3)


def test_train_mixer_again_embeds_nothing_and_gives_the_same_tensors(
    make_paged_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    world = make_paged_world()
    shutil.rmtree(world.cache)
    settings = {"steps": 3, "rotation_steps": 2}
    run(world, "first", **settings)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("embedded again")

    monkeypatch.setattr(DocumentEncoder, "encode", refuse)
    monkeypatch.setattr(DocumentEncoder, "encode_queries", refuse)
    run(world, "second", **settings)
    run(world, "other", **settings, seed=1)
    first, second, other = (
        load_file(tmp_path / name / "cairn_extra.safetensors") for name in ("first", "second", "other")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["landmark_mixer.title_gate"], other["landmark_mixer.title_gate"])


def test_train_mixer_keeps_judged_texts_out(make_paged_world: Callable[..., Any], tmp_path: Path):
    world = make_paged_world()
    judged = tmp_path / "judged"
    judged.mkdir()
    pq.write_table(pa.table({"text": ["d 0 1", "d 0 2"]}), judged / "corpus.parquet")
    pq.write_table(pa.table({"text": ["q 3 4"]}), judged / "queries.parquet")
    report = run(world, steps=1, rotation_steps=0, judged=(judged,))
    assert report.pairs == 93
    assert report.skipped == {"query of an evaluation set": 1, "document of an evaluation set": 2}


def test_train_mixer_with_nothing_held_out_keeps_the_last_step(make_paged_world: Callable[..., Any]):
    report = run(make_paged_world(), steps=3, rotation_steps=1, hold_out=0.0)
    assert (report.best_step, report.best_score, report.base_score, report.cut_scores) == (3, None, None, {})


def test_train_mixer_without_context_saves_settings_without_one(
    make_paged_world: Callable[..., Any], tmp_path: Path
):
    run(make_paged_world(), steps=2, rotation_steps=0, context_documents=0)
    assert (
        json.loads((tmp_path / "mixer" / "cairn_config.json").read_text())["encoder"]["use_context"] is False
    )


def test_train_mixer_sources_that_are_too_small_are_counted_and_none_left_is_refused(
    make_paged_world: Callable[..., Any],
):
    world = make_paged_world()
    with world.file.open("a") as stream:
        stream.write(json.dumps({"query": "q", "document": "d", "title": "", "source": "small"}) + "\n")
    report = run(world, steps=1, rotation_steps=0)
    assert (report.sources, report.skipped) == (1, {"pair of a source too small": 1})
    with pytest.raises(
        SourceError,
        match="at least min_pairs 97 pairs with two documents, got none: the largest, 's', has 96",
    ):
        run(world, "other", min_pairs=97)


def test_train_mixer_base_with_a_mixer_is_refused(make_paged_world: Callable[..., Any], tmp_path: Path):
    world = make_paged_world()
    run(world, steps=1, rotation_steps=0)
    with pytest.raises(ConfigError, match="one transformer that has no mixer yet"):
        run(world, "other", base=str(tmp_path / "mixer"))


def test_train_mixer_for_a_base_with_tensors_of_ours_keeps_them(
    make_paged_world: Callable[..., Any], tiny_latent_folder: Path, tmp_path: Path
):
    base = shutil.copytree(tiny_latent_folder, tmp_path / "base")
    (base / "cairn_config.json").write_text(json.dumps({"format": 1, "encoder": {"pooling": "latent"}}))
    run(make_paged_world(), steps=2, rotation_steps=0, base=str(base), cache=None)
    written = load_file(tmp_path / "mixer" / "cairn_extra.safetensors")
    own = load_file(base / "cairn_extra.safetensors")
    assert own
    assert all(torch.equal(written[name], tensor) for name, tensor in own.items())
    encoder = load_encoder(tmp_path / "mixer", use_context=False)
    assert encoder.config.pooling == "latent"
    assert encoder.encode_documents(["the cat sat on the mat"]).shape == (1, 32)


def test_train_mixer_folder_with_other_weights_under_its_base_is_refused(
    make_paged_world: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    world = make_paged_world()
    run(world, steps=1, rotation_steps=0, base=str(base))
    assert load_encoder(tmp_path / "mixer", use_context=False).vector_dim == 32
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, base / "model.safetensors")
    with pytest.raises(ModelError, match="restore those, or train it for these"):
        load_encoder(tmp_path / "mixer", use_context=False)


def test_train_mixer_rotation_dims_beyond_the_width_are_refused(make_paged_world: Callable[..., Any]):
    with pytest.raises(
        ConfigError, match="rotation_dims must be different numbers below the base model's 32, got \\[64\\]"
    ):
        run(make_paged_world(), rotation_dims=(64,))


NUM_DOCUMENTS = 60


def pairs_of(num_words: int) -> TrainingPairs:
    words = [word for word in TINY_WORDS if not word.startswith("#")]
    texts = [
        " ".join(np.random.default_rng(number).choice(words, num_words)) for number in range(NUM_DOCUMENTS)
    ]
    return TrainingPairs(
        queries=tuple(f"the {text[:12]}" for text in texts),
        documents=tuple(texts),
        titles=tuple(f"{words[number % 9]} {words[number // 9]}" for number in range(NUM_DOCUMENTS)),
        sources=("s",) * NUM_DOCUMENTS,
    )


@pytest.mark.parametrize(("num_words", "context_documents"), [(12, 40), (70, 40), (70, 0)])
def test_mixer_vectors_in_training_are_those_of_an_ingest(
    tiny_model_folder: Path, tmp_path: Path, num_words: int, context_documents: int
):
    settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32", landmark_interval=16)
    pairs = pairs_of(num_words)
    config = MixerConfig(
        context_documents=context_documents,
        max_context_tokens=48,
        context_absence=0.0,
        title_absence=0.0,
        grouped_share=0.0,
        hold_out=0.0,
    )
    vectors = BaseVectors(settings, None, config.context)
    data = embed_sources(pairs, vectors, config, silent_progress)
    torch.manual_seed(0)
    mixer = LandmarkMixer(data.width, num_heads=2, head_dim=8).requires_grad_(False)
    for name, parameter in mixer.named_parameters():
        if "gate" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    batch = BatchMaker(data, config).training_batch(0)
    trained = mixer.mix(batch.stretches, batch.context_CD)[batch.stretches.is_landmark_SL].numpy()

    checkpoint = read_checkpoint(tiny_model_folder)
    base = Base(model=str(tiny_model_folder), weights_sha256=checkpoint.weights_sha256)
    brought = replace(settings, use_context=context_documents > 0)
    save_mixer(tmp_path / "mixer", mixer, base, brought, context=config.context)
    context = None
    if batch.context_CD is not None:
        served_config = context_config(str(tmp_path / "mixer"), {})
        first_stage = ContextEncoder.of(vectors.encoder.backbone, settings, served_config)
        served_nD = unit(first_stage.embed(pairs.documents))
        drawn = [pairs.documents[place] for place in (batch.context_CD.numpy() @ served_nD.T).argmax(1)]
        assert len(set(drawn)) == len(drawn) == served_config.context_documents == 40
        ids = tuple(map(str, range(len(drawn))))
        context = ContextSet(
            doc_ids=ids,
            content_sha256s=ids,
            cluster_ids_C=np.zeros(len(ids), np.int32),
            embeddings_CD=first_stage.embed(drawn),
            first_stage_fingerprint=first_stage.fingerprint,
        )
    served = DocumentEncoder(replace(brought, model=str(tmp_path / "mixer")), context)
    documents = [int(own[0]) for own in batch.document_SL]
    encoded = served.encode(
        [pairs.documents[number] for number in documents],
        titles=[pairs.titles[number] for number in documents],
    )
    assert (1 - (encoded.chunk_vectors_MV * trained).sum(1)).max() < 1e-4


def test_mixer_config_dims_are_a_third_and_a_sixth_unless_chosen():
    assert MixerConfig().dims_of(384) == (128, 64)
    assert MixerConfig(rotation_dims=(16, 64)).dims_of(384) == (64, 16)
