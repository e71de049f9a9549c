from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from cairn.pipeline.model.engine.workspace import Workspace


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
