from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.errors import (
    FingerprintMismatchError,
)
from cairn.pipeline.lab.train.trainer import read_log
from safetensors.torch import load_file

from tests.lab.train.conftest import LOOP_SETTINGS


class KilledError(Exception):
    pass


def dying_after(step: int) -> Callable[..., None]:
    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "train" and done == step:
            raise KilledError

    return listen


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors") | load_file(
        folder / "model" / "cairn_extra.safetensors"
    )


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name != "seconds"}
        for record in read_log(folder / "log.jsonl")
    ]


def test_train_stopped_and_resumed_ends_bit_for_bit_as_if_undisturbed(run: Any, tmp_path: Path):
    run("straight")
    straight = weights(tmp_path / "straight")
    for step in (1, 2, 7):  # before the first checkpoint, at one, between an evaluation and the next
        name = f"killed {step}"
        with pytest.raises(KilledError):
            run(name, dying_after(step))
        assert run(name).resumed_at == step - step % 2
        resumed = weights(tmp_path / name)
        assert all(torch.equal(tensor, resumed[key]) for key, tensor in straight.items())
        assert without_times(tmp_path / "straight") == without_times(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 2])
def test_train_killed_at_a_commit_point_ends_bit_for_bit_as_if_undisturbed(
    run: Any, tmp_path: Path, tiny_model_folder: Path, pairs_file: Path, nth: int
):
    run("straight")
    program = f"""
import os
from pathlib import Path
import torch
from cairn.pipeline import durable
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.contrastive import TrainReport
torch.set_num_threads(1)
seen = []
def observe(name):
    seen.append(name)
    if seen.count("train.checkpoint") == {nth}:
        os._exit(9)
durable.observe_commit_points(observe)
train([Path({str(pairs_file)!r})], Path({str(tmp_path / "killed")!r}), TrainConfig(**{LOOP_SETTINGS!r}),
    base={str(tiny_model_folder)!r})
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", program], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ).returncode
        == 9
    )
    assert run("killed").resumed_at == 2 * nth
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


@pytest.mark.slow
def test_train_damaged_checkpoint_is_passed_over_for_the_one_before(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run("straight")
    with pytest.raises(KilledError):
        run("killed", dying_after(7))
    damaged = tmp_path / "killed" / "checkpoints" / "00000006" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        assert run("killed").resumed_at == 4
    assert "checkpoint 00000006 is damaged" in caplog.text
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


def test_train_finished_run_is_not_trained_on(run: Any, tmp_path: Path):
    run()
    before = weights(tmp_path / "run")
    assert run().resumed_at == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "run").items())


def test_train_keeps_the_two_newest_checkpoints(run: Any, tmp_path: Path):
    run()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "00000006",
        "00000008",
    ]


@pytest.mark.slow
def test_train_in_bf16_resumed_ends_bit_for_bit_as_if_undisturbed(run: Any, tmp_path: Path):
    run("straight", precision="bf16")
    with pytest.raises(KilledError):
        run("killed", dying_after(5), precision="bf16")
    run("killed", precision="bf16")
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_train_low_rank_stopped_and_resumed_ends_bit_for_bit_as_if_undisturbed(
    run: Any, tmp_path: Path, step: int
):
    run("straight", lora_rank=4)
    with pytest.raises(KilledError):
        run("killed", dying_after(step), lora_rank=4)
    assert run("killed", lora_rank=4).resumed_at == step - step % 2
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert without_times(tmp_path / "straight") == without_times(tmp_path / "killed")


def test_train_low_rank_leaves_all_but_the_layers_matrices_as_the_base_has_them(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(steps=3, lora_rank=4)
    trained, base = weights(tmp_path / "run"), load_file(tiny_model_folder / "model.safetensors")
    moved = {name for name, tensor in base.items() if not torch.equal(tensor, trained[name])}
    assert moved == {
        name for name in base if ".layer." in name and name.endswith("weight") and "LayerNorm" not in name
    }


def test_train_setting_younger_than_the_run_stood_at_its_default(run: Any, tmp_path: Path):
    run(steps=1)
    path = tmp_path / "run" / "run.json"
    stored = json.loads(path.read_text())
    del stored["settings"]["lora_rank"]
    path.write_text(json.dumps(stored))
    assert run(steps=1).resumed_at == 1
    with pytest.raises(FingerprintMismatchError, match="lora_rank 0"):
        run(steps=1, lora_rank=2)


def test_train_goes_on_only_in_the_arithmetic_it_began_in(run: Any):
    run(steps=1, precision="fp32")
    with pytest.raises(FingerprintMismatchError, match="precision fp32"):
        run(steps=1, precision="bf16")
