"""Two processes over gloo, started by torchrun as a user starts them.

What one process by itself does is the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.processes import ALONE, first_before_others, joined_processes
from cairn.pipeline.lab.train.trainer import read_log
from safetensors.torch import load_file


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_joined_processes_without_torchrun_is_one_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined_processes() as processes:
        assert processes is ALONE


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be the number of processes, got 'two'"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            "must be started by torchrun, which tells them where to meet",
        ),
    ],
)
def test_joined_processes_of_a_broken_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence), joined_processes():
        pass


def test_one_process_has_all_parts_and_changes_no_gradient():
    parts = {0: torch.ones(2, 3), 1: torch.zeros(1, 3)}
    assert list(ALONE.share(2)) == [0, 1]
    assert all(torch.equal(found, parts[number]) for number, found in enumerate(ALONE.gather(parts, 2)))
    parameter = torch.nn.Parameter(torch.ones(2))
    ALONE.add_up_gradients([parameter])
    assert parameter.grad is None
    with first_before_others(ALONE):
        ALONE.wait()


SETTINGS: dict[str, Any] = {
    "steps": 4,
    "batch_pairs": 12,
    "sequence_documents": 3,
    "max_document_tokens": 48,
    "context_documents": 4,
    "max_context_tokens": 12,
    "context_absence": 0.3,
    "context_dropout": 0.3,
    "hard_negatives": 1,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "peak_lr": 1e-3,
    "matryoshka_dims": [8, 32],
    "precision": "fp32",
}


PROGRAM = """
import json, os, signal, socket, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from cairn.pipeline import durable
from cairn.pipeline.lab.train import trainer
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.processes import joined_processes
from cairn.pipeline.lab.train.settings import TrainConfig

base, pairs, settings = sys.argv[1:4]
torch.set_num_threads(1)
real_step = trainer.add_gradient

def work(output, dies_after=-1):
    steps = []

    def step_and_keep(batch, model, *arguments):
        found = real_step(batch, model, *arguments)
        steps.append(1)
        if len(steps) == 1:  # the first step's gradient, before the optimiser's
            gradients = {
                name: each.grad.contiguous().clone()
                for name, each in model.named_parameters()
                if each.grad is not None
            }
            save_file(gradients, f"{output}-gradients-{processes.rank}.safetensors")
        return found

    def die(name):
        newest = Path(output, "checkpoints", f"{int(dies_after):08d}.json")
        if name == "train.checkpoint" and newest.exists():
            os._exit(9)

    trainer.add_gradient = step_and_keep
    durable.observe_commit_points(die)
    with joined_processes() as processes:
        config = TrainConfig(**json.loads(settings))
        report = train([Path(pairs)], Path(output), config, base=base, processes=processes)
    done = {"rank": processes.rank, "size": processes.size}
    done |= {"resumed_at": report.resumed_at, "loss": report.last_loss}
    Path(f"{output}-{processes.rank}.json").write_text(json.dumps(done))

def fork(size, output, dies_after=-1):
    # What torchrun does, from a process that has imported everything: it tells who is who, and ends all when
    # one fails.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):
        pids.append(os.fork())
        if not pids[-1]:
            if size > 1:
                given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
                given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in given.items()})
            work(output, dies_after)
            os._exit(0)
    for left in range(size, 0, -1):
        pid, status = os.wait()
        pids.remove(pid)
        if status and left == size:
            assert (os.waitstatus_to_exitcode(status), dies_after >= 0) == (9, True)
            for other in pids:
                os.kill(other, signal.SIGKILL)

if sys.argv[4:5] == ["fork"]:
    for size, output, dies_after in json.loads(sys.argv[5]):
        fork(size, output, dies_after)
else:
    work(sys.argv[4])
"""


@pytest.fixture
def start(tiny_model_folder: Path, pairs_file: Path, tmp_path: Path) -> Any:
    """Return what runs the program above with these words."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(*words: str, launcher: tuple[str, ...] = ()) -> None:
        given = [str(tiny_model_folder), str(pairs_file), json.dumps(SETTINGS), *words]
        command = [sys.executable, *launcher, str(program), *given]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    return run


def said(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """Return what each process said at its end."""
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}-?.json"))]


def gradients(tmp_path: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / f"{name}-gradients-{rank}.safetensors")


def logged(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in read_log(tmp_path / name / "log.jsonl")
    ]


@pytest.mark.slow
def test_two_processes_make_the_gradient_of_one_on_the_same_batch_and_go_on_after_a_kill(
    start: Any, tmp_path: Path
):
    start(
        str(tmp_path / "both"),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    killed = str(tmp_path / "killed")
    start("fork", json.dumps([[1, str(tmp_path / "alone"), -1], [2, killed, 2], [2, killed, -1]]))

    assert [each["size"] for each in said(tmp_path, "alone")] == [1]
    both = said(tmp_path, "both")
    assert [(each["rank"], each["size"]) for each in both] == [(0, 2), (1, 2)]
    assert both[0]["loss"] == both[1]["loss"]

    one, first, second = (
        gradients(tmp_path, "alone"),
        gradients(tmp_path, "both"),
        gradients(tmp_path, "both", 1),
    )
    assert set(one) == set(first) == set(second)
    for name, gradient in one.items():
        assert float((first[name] - gradient).abs().max()) <= 1e-5, name
        assert torch.equal(first[name], second[name]), name

    by_one, by_two = logged(tmp_path, "alone"), logged(tmp_path, "both")
    assert len(by_one) == len(by_two) == SETTINGS["steps"] + 3
    assert by_two[1]["loss"] == pytest.approx(by_one[1]["loss"], abs=1e-5)
    assert [record["num_tokens"] for record in by_two if "loss" in record] == [
        record["num_tokens"] for record in by_one if "loss" in record
    ]

    assert [each["resumed_at"] for each in said(tmp_path, "killed")] == [2, 2]
    straight, resumed = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("both", "killed")
    )
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert logged(tmp_path, "killed") == by_two
