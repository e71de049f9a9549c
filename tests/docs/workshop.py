"""A folder in which the commands of README and guide run: tiny corpora and the few commands they use."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.cli.settings import load_default_map, settings_of_verb

from tests.docs.pages import ROOT, Block, shell_lines

ADDRESS = re.compile(r"(http://)?(127\.0\.0\.1|localhost):8400")
SMALLER = {"2000": "2", "200": "2"}
"""Steps of a training, which would take hours, and how many are run."""
SETTINGS = {
    "CAIRN_EVALUATE_CONTEXT_DOCUMENTS": "4",
    "CAIRN_TRAIN_BATCH_PAIRS": "8",
    "CAIRN_TRAIN_HELDOUT_PAIRS": "4",
    "CAIRN_TRAIN_CONTEXT_DOCUMENTS": "4",
    "CAIRN_PRETRAIN_BATCH_ROWS": "2",
    "CAIRN_PRETRAIN_MAX_TOKENS": "64",
    "CAIRN_TRAIN_MIXER_MIN_PAIRS": "8",
    "CAIRN_TRAIN_MIXER_STEPS": "2",
    "CAIRN_TRAIN_MIXER_ROTATION_STEPS": "2",
    "CAIRN_TRAIN_MIXER_HOLD_OUT": "0.2",
    "CAIRN_SAMPLE_MAX_DOCUMENTS": "8",
}
TOPICS = ("passwords", "accounts", "invoices", "deliveries", "returns", "languages", "printers", "backups")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def write_corpora(folder: Path) -> None:
    """Write the files that pages name.

    Two corpora, judged queries, training pairs, texts with labels, long documents.
    """
    texts = [
        f"To change {topic} open the settings and choose {topic}. " + f"Help with {topic} is there. " * 20
        for topic in TOPICS
    ]
    titles = [f"About {topic}" for topic in TOPICS]
    ids = [f"guides/{topic}" for topic in TOPICS]
    ids[-1] = "doc-3"
    count = len(TOPICS)
    corpus = {"id": ids, "text": texts, "title": titles, "year": range(2018, 2018 + count)}
    queries = [f"how do I change {topic}" for topic in TOPICS]
    write(folder / "articles" / "a.parquet", {**corpus, "kind": ["guide", "note"] * (count // 2)})
    write(folder / "notes.parquet", {"key": ids, "body": texts, "headline": titles})
    judged = folder / "judged"
    write(judged / "corpus.parquet", {key: corpus[key] for key in ("id", "text", "title")})
    write(judged / "queries.parquet", {"id": [f"q{i}" for i in range(count)], "text": queries})
    relevant = {"query_id": [f"q{i}" for i in range(count)], "doc_id": ids, "score": [1] * count}
    write(judged / "qrels.parquet", {**relevant, "start": [0] * count, "end": [60] * count})
    asked = [f"where is number {i} of the {topic}" for topic in TOPICS for i in range(6)]
    answers = [f"Number {i} of the {topic} lies on shelf {i}." for topic in TOPICS for i in range(6)]
    pages = [f"Shelves of {topic}" for topic in TOPICS for _ in range(6)]
    pairs = {"query": asked, "document": answers, "title": pages, "source": ["shelves"] * len(asked)}
    write(folder / "pairs" / "a.parquet", pairs)
    labels = {"query": asked, "label": [topic for topic in TOPICS for _ in range(len(asked) // count)]}
    write(folder / "labelled" / "topics.parquet", labels)
    sections = [
        "\n\n".join(
            f"# Part {i} of {topic}\n\n"
            + " ".join(f"Step {n} of part {i} turns the {topic} by {n + i} degrees." for n in range(8))
            for i in range(4)
        )
        for topic in TOPICS
    ]
    write(folder / "manuals.parquet", {"text": sections, "title": titles})
    shelves = [f"{topic} {number}" for topic in TOPICS for number in range(3)]
    books = [f"This book explains {shelf} in full. " + f"More on {shelf} follows. " * 40 for shelf in shelves]
    write(folder / "library" / "a.parquet", {"id": shelves, "text": books})


def write(path: Path, columns: dict[str, Any]) -> None:
    """Write a Parquet file."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)


class Workshop:
    """Runs the blocks of one page, in order, in one folder."""

    def __init__(self, patched: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        self.patched, self.stack = patched, stack
        self.names: dict[str, Any] = {}
        self.server: str | None = None
        self.commands: dict[str, Callable[[list[str]], None]] = {
            "cairn": self.cairn,
            "ingest": lambda words: self.cairn(["ingest", *words]),
            "curl": self.curl,
            "pip": install,
            "make": make,
            "export": self.export,
            "python": lambda words: require(words == ["-m", "venv", ".venv"]),
            ".": lambda words: require(words == [".venv/bin/activate"]),
        }

    def run(self, block: Block) -> None:
        """Run a block; the commands of a shell block are those of ``commands`` and no others."""
        if block.language == "python":
            text = ADDRESS.sub(lambda _: self.address(), block.text)
            exec(compile(text, block.name, "exec"), self.names)
        elif block.language == "toml":
            self.settings(block.text)
        elif block.language == "sh":
            for line in shell_lines(block.text):
                words = shlex.split(line, comments=True)
                assert words[0] in self.commands, f"{block.name}: no test can run {line!r}; say why"
                self.commands[words[0]](words[1:])

    def cairn(self, words: list[str]) -> None:
        """Run a verb, and leave it running where it is a server's."""
        if words[0] == "serve":
            self.serve(words)
        elif words == ["schedule", "run"]:
            self.start(words)
            wait_until(lambda: run(cairn, ["schedule", "health"], "cairn") == 0)
        else:
            require(run(cairn, [SMALLER.get(word, word) for word in words], "cairn") == 0)

    def start(self, words: list[str]) -> None:
        """Start a process that ends with the page."""
        command = [sys.executable, "-m", "cairn.cli.main", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)
        require(process.poll() is None)

    def serve(self, words: list[str]) -> None:
        """Serve at a port that is free, and wait until collections are open."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.start([*words, "--port", str(port), "--deadline-seconds", "120"])
        self.server = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{self.server}/readyz"))

    def address(self) -> str:
        """Return the server's address, after starting one where the page has not."""
        if self.server is None:
            self.serve(["serve"])
        assert self.server is not None
        return self.server

    def curl(self, words: list[str]) -> None:
        """Send a request, which may use these options and no others."""
        address, headers, body = "", {}, None
        rest = iter(words)
        for word in rest:
            if word == "-H":
                name, _, value = next(rest).partition(": ")
                headers[name] = value
            elif word == "-d":
                body = next(rest).encode()
            elif word != "-s":
                address = ADDRESS.sub(lambda _: self.address(), word)
        with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as response:
            require(response.status == 200 and response.read().startswith(b"{"))

    def export(self, words: list[str]) -> None:
        """Set variables for the rest of the page."""
        for word in words:
            self.patched.setenv(*word.split("=", 1))

    def settings(self, text: str) -> None:
        """Read a block as cairn.toml; its keys must be options of its verbs."""
        Path("cairn.toml").write_text(text, "utf-8")
        try:
            for verb, values in load_default_map().items():
                command = cairn.get_command(click.Context(cairn), verb)
                assert command is not None, verb
                settings_of_verb(command, values)
        finally:
            Path("cairn.toml").unlink()


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for a process that was started, for at most two minutes."""
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(address: str) -> bool:
    """Whether an address answers 200."""
    try:
        with urllib.request.urlopen(address):
            return True
    except OSError:
        return False


def require(condition: bool) -> None:
    """Fail where a command did not do what its page says."""
    assert condition


def install(words: list[str]) -> None:
    """Check that the extras and requirements of a `pip install` are the project's."""
    assert words[0] == "install"
    known = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["client"]]
    if words[1:] == ["./pipeline/client"]:
        assert (ROOT / "pipeline/client/pyproject.toml").is_file()
        return
    for word in words[1:]:
        extras = re.fullmatch(r"\.\[([\w,-]+)\]", word)
        if extras is None:
            assert word in [*known, *(re.split("[<>=[]", line)[0] for line in known)], word
        else:
            assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"]), word


def make(words: list[str]) -> None:
    """Check that a target is there."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(words) <= set(targets), words


@contextlib.contextmanager
def open_workshop(folder: Path) -> Generator[Workshop]:
    """Work in a folder until the page is done; everything that was started is ended."""
    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
        patched.chdir(folder)
        for name in ("CAIRN_ROOT", "CAIRN_COLLECTION", "CAIRN_CONFIG", "CAIRN_API_KEY", "RAY_ADDRESS"):
            patched.delenv(name, raising=False)
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        yield Workshop(patched, stack)
