"""What all tests share: no network, one thread a process, checked shapes, the modules of shared fixtures."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

# Before torch, FAISS, tokenizers or Ray are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it runs in the background ignore interrupts, and so would what tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import install_import_hook

hypothesis.settings.register_profile("cairn", deadline=None)  # a busy machine takes its time
hypothesis.settings.load_profile("cairn")

pytest_plugins = [
    "tests.tiny_models",
    "tests.cde_checkpoints",
    "tests.damages",
    "tests.embedding_server",
    "tests.encode.sentence_transformers_folders",
    "tests.object_stores",
    "tests.ray_machines",
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without Python's garbage collector, and exempt from it what exists afterwards.

    It would look through a million objects of imported libraries again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run the tests that share a fixture of their module, which is then made once."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group") is None:
            fixtures = item._fixtureinfo.name2fixturedefs.values()
            if any(fixture[-1].scope in ("class", "module") for fixture in fixtures):
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture Cairn's log whatever a library that an earlier test loaded has set."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "cairn":
            monkeypatch.setattr(logger, "disabled", False)
            monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def has_array(hint: Any) -> bool:
    """Return whether an annotation is that of an array with a shape, or contains one."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    parts = hint if isinstance(hint, list) else get_args(hint)
    return any(map(has_array, parts))


def checked(*, typechecker: Any, check: Callable[..., Any] = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """Stand in for ``jaxtyping.jaxtyped``, whose wrapper takes longer than most functions of a tiny model.

    beartype alone checks functions whose annotations name no shape. Functions inside functions stay
    unchecked, because they would be wrapped at every call.
    """

    def wrap(item: Any) -> Any:
        if "<locals>" in item.__qualname__:
            return item
        if inspect.isfunction(item):
            try:
                hints = get_type_hints(item, include_extras=True)
            except NameError:  # names a class that is defined below it
                hints = None
            if hints is not None and not any(map(has_array, hints.values())):
                return beartype(item)
        return check(item, typechecker=typechecker)

    return wrap


jaxtyping.jaxtyped = checked
install_import_hook(
    [
        "cairn.pipeline.lab.evaluate",
        "cairn.pipeline.model",
        "cairn.pipeline.lab.train",
        "cairn.pipeline.encode",
        "cairn.pipeline.encode.tokenization",
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
def torch_threads() -> Iterator[Callable[[int], None]]:
    """Return what sets how many threads torch uses until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make samples of a few modules; reading all of them takes seconds."""
    from cairn.pipeline.corpus import sample

    modules = sample._library_sources()[:20]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(sample, "_library_sources", lambda: modules)


@pytest.fixture(autouse=True)
def one_round_of_codebooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit the codebooks of token vectors by one round of K-means; ten take longer than a small ingest.

    Workers of Ray fit theirs in other processes, and must find what is found here.
    """
    if request.node.get_closest_marker("ray") is None:
        monkeypatch.setattr("cairn.pipeline.token_vectors.codebook.NUM_ITERATIONS", 1)
