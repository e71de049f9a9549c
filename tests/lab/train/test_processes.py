from __future__ import annotations

import pytest
import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.processes import ALONE, first_before_others, joined_processes


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
