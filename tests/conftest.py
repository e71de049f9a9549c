"""What all tests share: no network, one thread a process, checked shapes, the modules of shared fixtures."""

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
    "tests.late_models",
    "tests.cde_checkpoints",
    "tests.encode.sentence_transformers_folders",
    "tests.object_stores",
    "tests.ray_machines",
    "tests.stored_collections",
    "tests.served_stones",
]
"""Fixtures used by several folders; pytest calls this folder ``tests``, wherever it runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of single tests: what they rewrite, how many cases they draw."""
    parser.addoption(
        "--rewrite-models", action="store_true", help="write docs/guide/models.md's table of models"
    )
    parser.addoption("--api-cases", type=int, default=300, help="cases of the API's fuzz run")
    parser.addoption("--api-seed", type=int, default=0, help="seed of the API's fuzz run")
    parser.addoption(
        "--rewrite-openapi", action="store_true", help="write the API's description into tests/golden"
    )


def check_outermost(
    *, typechecker: Any, check: Callable[..., Any] = jaxtyping.jaxtyped
) -> Callable[[Any], Any]:
    """Stand in for ``jaxtyping.jaxtyped`` and leave functions inside functions unchecked.

    They would be wrapped at every call, which is more than half of the time a tiny model takes for a text.
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
def nothing_is_kept_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give all tests a cache folder that goes with them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CAIRN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Flush nothing to the disk: hundreds of ingests would wait for it a third of their time.

    No test cuts the power. Tests of flushing replace ``os.fsync`` themselves; benchmarks and the processes
    that tests start do flush.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make samples of a few modules; reading all of them takes seconds."""
    from pipeline.corpus import python_documentation

    modules = python_documentation._library_sources()[:20]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(python_documentation, "_library_sources", lambda: modules)
