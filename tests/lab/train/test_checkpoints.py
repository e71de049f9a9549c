from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import DiskFullError, TryAgainError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import RunFolder, RunState, held_folder, make_optimizer
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.own_tensors import LANDMARK_GATES

DISK_BYTES = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk with room for a few checkpoints."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(
            "needs the right to mount a tmpfs; "
            "test_train_full_disk_at_a_checkpoint_leaves_the_one_before makes the claim without"
        )
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def run_folder(folder: Path, base: Path, **encoder: object) -> RunFolder:
    return RunFolder(folder, read_checkpoint(base), EncoderConfig(**encoder))


def test_run_folder_model_saved_again_is_the_new_one_alone(tiny_model_folder: Path, tmp_path: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    files = run_folder(tmp_path, tiny_model_folder, pooling="lmk", attention="landmark")
    for gate in (-1.0, -2.0):
        torch.nn.init.constant_(model.get_parameter(LANDMARK_GATES), gate)
        files.save_model("best", model)
        (tmp_path / "best" / "mine.txt").write_text("gone with the next one")
    files.save_model("best", model)
    assert torch.equal(
        read_checkpoint(tmp_path / "best").tensors["landmark_attention.gates"],
        model.get_parameter(LANDMARK_GATES),
    )
    assert not (tmp_path / "best" / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert encoder_config({"model": str(tmp_path / "best")}).pooling == "lmk"


def test_run_folder_checkpoint_on_a_disk_that_is_full_is_said_in_a_sentence_and_leaves_those_before(
    tiny_model_folder: Path, disk: Path
):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    files = run_folder(disk / "run", tiny_model_folder)
    first = files.save(RunState(step=1, log_bytes=0, best_score=0.0, best_step=0), model, optimizer)
    (disk / "filler").write_bytes(
        b"0" * (DISK_BYTES - 4096 - sum(path.stat().st_blocks * 512 for path in disk.rglob("*")))
    )
    with pytest.raises(DiskFullError, match="no space left while writing checkpoints/00000002"):
        files.save(RunState(step=2, log_bytes=0, best_score=0.0, best_step=0), model, optimizer)
    assert files.newest() == first
    assert [path.name for path in first.parent.iterdir()] == ["00000001"]
    with pytest.raises(DiskFullError, match="no space left while saving the model"):
        files.save_model("best", model)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("state.json", lambda text: text.replace('"step": 2', '"step": 3')),
        ("state.json", lambda text: text.replace('"sha256": {', '"sha256": 7, "other": {')),
        ("config.json", lambda text: text[:-9]),
        ("tokenizer.json", lambda text: text.replace("river", "rifer")),
    ],
    ids=["another step", "no hashes", "a cut configuration", "another tokenizer"],
)
def test_run_folder_newest_passes_over_a_checkpoint_with_any_file_damaged(
    name: str, damage: Callable[[str], str], tiny_model_folder: Path, tmp_path: Path
):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    files = run_folder(tmp_path, tiny_model_folder)
    first, second = (
        files.save(RunState(step=step, log_bytes=0, best_score=0.5, best_step=1), model, optimizer)
        for step in (1, 2)
    )
    assert files.newest() == second
    whole = (second / name).read_text()
    (second / name).write_text(damage(whole))
    assert (second / name).read_text() != whole
    assert files.newest() == first


def test_held_folder_keeps_a_second_training_out_and_clears_what_a_killed_one_left(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / ".00000004.17.tmp").mkdir(parents=True)
    (folder / "checkpoints" / "00000002").mkdir()
    (folder / ".run.json.17.tmp").write_text("{")
    with held_folder(folder):
        assert sorted(path.name for path in folder.rglob("*")) == [".lock", "00000002", "checkpoints"]
        with (
            pytest.raises(
                TryAgainError, match=r"one training at a time, got another at work \(process \d+\)"
            ),
            held_folder(folder),
        ):
            pass
    with held_folder(folder):
        pass
