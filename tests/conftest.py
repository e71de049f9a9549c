"""Shared by all tests: no network, one thread a process, shapes checked.

And where fixtures of several folders are.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

# Before torch, FAISS, tokenizers or Ray are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import jaxtyping
import pytest
from jaxtyping import install_import_hook

pytest_plugins = [
    "tests.tiny_models",
    "tests.cde_checkpoints",
    "tests.object_stores",
    "tests.ray_machines",
    "tests.stored_collections",
    "tests.served_stones",
]
"""Fixtures of several folders; ``tests`` is what pytest calls this folder, wherever it runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make models` write the table of README that a test compares otherwise, and the rest of the options."""
    parser.addoption("--rewrite-readme", action="store_true", help="write what the tests find into README.md")
    parser.addoption("--api-cases", type=int, default=300, help="cases of the API's fuzz run")
    parser.addoption("--api-seed", type=int, default=0, help="seed of the API's fuzz run")
    parser.addoption(
        "--rewrite-openapi", action="store_true", help="write the API's description into tests/golden"
    )


def check_outermost(
    *, typechecker: Any, check: Callable[..., Any] = jaxtyping.jaxtyped
) -> Callable[[Any], Any]:
    """Stand in the place of ``jaxtyping.jaxtyped``: a function in a function would be wrapped anew at every call.

    That is more than half of the time a tiny model takes to encode a text.
    """
    return lambda item: item if "<locals>" in item.__qualname__ else check(item, typechecker=typechecker)


jaxtyping.jaxtyped = check_outermost
install_import_hook(
    [
        "pipeline.evaluate",
        "pipeline.model",
        "pipeline.train",
        "pipeline.encode",
        "pipeline.corpus.tokenization",
    ],
    "beartype.beartype",
)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Flush nothing to the disk: no test cuts the power, and hundreds of ingests would wait for a third of the time.

    What is flushed and when is tested by who asks for it; measurements flush (tests/benchmarks), as do the
    processes that tests start.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make samples of a few modules: all of them take seconds to read."""
    from pipeline.corpus import sample

    modules = sample._library_sources()[:20]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(sample, "_library_sources", lambda: modules)
