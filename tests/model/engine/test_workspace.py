from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from cairn.pipeline.model.engine.workspace import Workspace


def test_take_same_purpose_gives_the_same_memory():
    workspace = Workspace(torch.device("cpu"))
    first = workspace.take("x", (4, 3), torch.float32)
    assert workspace.take("x", (2, 5), torch.float32).data_ptr() == first.data_ptr()


def test_take_larger_shape_grows():
    workspace = Workspace(torch.device("cpu"))
    workspace.take("x", (2,), torch.float32)
    assert workspace.take("x", (100, 7), torch.float32).shape == (100, 7)


def test_take_other_purpose_gives_other_memory():
    workspace = Workspace(torch.device("cpu"))
    assert (
        workspace.take("x", (4,), torch.float32).data_ptr()
        != workspace.take("y", (4,), torch.float32).data_ptr()
    )


def test_take_two_threads_never_share_memory():
    workspace, both = Workspace(torch.device("cpu")), Barrier(2)

    def take():
        both.wait()
        pointer = workspace.take("x", (4,), torch.float32).data_ptr()
        both.wait()
        return pointer

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(take), pool.submit(take)
        assert one.result() != two.result()
