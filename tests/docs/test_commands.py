"""The command blocks of README and guide, run in order, page by page, on tiny corpora.

A block that cannot run here is preceded by a comment that names one of :data:`REASONS`; it is read all the
same. ``pytest tests/docs/test_commands.py --collect-only -q -k not_run`` lists them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.cli.settings import read_settings

from tests.docs.pages import GUIDE, README, ROOT, Block, blocks, shell_lines
from tests.served_stones import serving_process, wait_until

REASONS = {
    "docker": "needs a Docker engine; tests/test_compose.py runs the services' commands",
    "download": "needs a model that no package brings",
    "gpu": "needs a GPU for an hour; tests/lab/train/test_default_encoder.py runs a small one",
    "open": "would serve other machines",
    "kubernetes": "needs a cluster; tests/jobs/test_configs.py reads what it would get",
    "ray": "needs a Ray cluster; tests/jobs/ray_cluster runs one",
    "s3": "needs a bucket; tests/line/test_store_index.py has a local one",
}
PAGES = [README, *GUIDE]
LEFT_OUT = [block for page in PAGES for block in blocks(page) if block.reason is not None]
ADDRESS = re.compile(r"(http://)?(127\.0\.0\.1|localhost):8400")
FEWER_STEPS = {"2000": "2", "200": "2", "400": "8"}
SETTINGS = {
    "EVALUATE_CONTEXT_DOCUMENTS": "4", "TRAIN_BATCH_PAIRS": "8", "TRAIN_HELDOUT_PAIRS": "4",
    "TRAIN_CONTEXT_DOCUMENTS": "4", "PRETRAIN_BATCH_ROWS": "2", "PRETRAIN_MAX_TOKENS": "64",
    "SAMPLE_MAX_DOCUMENTS": "8", "EXPERIMENT_SEEDS": "1", "EXPERIMENT_BATCH_PAIRS": "8",
}  # fmt: skip
"""Of ``CAIRN_*``: training that takes seconds."""
TOPICS = ("passwords", "accounts", "invoices", "deliveries", "returns", "languages", "printers", "backups")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def write(path: Path, **columns: Sequence[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)


def write_corpora(folder: Path) -> None:
    """Write the files that pages name: corpora, judged queries, pairs, texts with labels, long documents."""
    count, numbers = len(TOPICS), range(6)
    texts = [
        f"To change {topic} open the settings and choose {topic}. " + f"Help with {topic} is there. " * 20
        for topic in TOPICS
    ]
    titles, ids = [f"About {topic}" for topic in TOPICS], [f"guides/{topic}" for topic in TOPICS]
    ids[-1] = "doc-3"
    years, kinds = range(2018, 2018 + count), ["guide", "note"] * (count // 2)
    write(folder / "articles/a.parquet", id=ids, text=texts, title=titles, year=years, kind=kinds)
    write(folder / "notes.parquet", key=ids, body=texts, headline=titles)
    query_ids = [f"q{number}" for number in range(count)]
    write(folder / "judged/corpus.parquet", id=ids, text=texts, title=titles)
    write(folder / "judged/queries.parquet", id=query_ids, text=[f"how do I change {t}" for t in TOPICS])
    places = {"start": [0] * count, "end": [60] * count}
    write(folder / "judged/qrels.parquet", query_id=query_ids, doc_id=ids, score=[1] * count, **places)
    asked = [f"where is number {number} of the {topic}" for topic in TOPICS for number in numbers]
    answers = [
        f"Number {number} of the {topic} lies on shelf {number}." for topic in TOPICS for number in numbers
    ]
    pages = [f"Shelves of {topic}" for topic in TOPICS for _ in numbers]
    sources = ["shelves"] * len(asked)
    write(folder / "pairs/a.parquet", query=asked, document=answers, title=pages, source=sources)
    labels = [topic for topic in TOPICS for _ in numbers]
    others = [[other for other in TOPICS if other != topic] for topic in labels]
    write(folder / "labelled/topics.parquet", query=asked, document=labels, negatives=others)
    manuals = [
        "\n\n".join(
            f"# Part {part} of {topic}\n\n"
            + " ".join(f"Step {n} of part {part} turns the {topic} by {n + part} degrees." for n in range(8))
            for part in range(4)
        )
        for topic in TOPICS
    ]
    write(folder / "manuals.parquet", text=manuals, title=titles)
    shelves = [f"{topic} {number}" for topic in TOPICS for number in range(3)]
    books = [f"This book explains {shelf} in full. " + f"More on {shelf} follows. " * 40 for shelf in shelves]
    write(folder / "library/a.parquet", id=shelves, text=books)


class Workshop:
    """Runs the blocks of one page, in order, in one folder, with a test's own version of each program."""

    def __init__(self, patched: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        self.patched, self.stack = patched, stack
        self.names: dict[str, Any] = {}
        self.server: str | None = None
        self.programs: dict[str, Callable[[list[str]], None]] = {
            "cairn": self.cairn,
            "ingest": lambda words: self.cairn(["ingest", *words]),
            "curl": self.curl,
            "pip": self.pip,
            "make": self.make,
            "export": self.export,
            "python": lambda words: None,
            "python3": lambda words: None,
            ".": lambda words: None,
        }

    def run(self, block: Block) -> None:
        if block.language == "python":
            text = ADDRESS.sub(lambda _: self.address(), block.text)
            exec(compile(text, block.name, "exec"), self.names)
        elif block.language == "toml" and "cron = " in block.text:
            Path("cairn-schedules.toml").write_text(block.text, "utf-8")
        elif block.language == "toml":
            self.settings(block.text)
        elif block.language == "sh":
            for line in shell_lines(block.text):
                program, *words = shlex.split(line, comments=True)
                assert program in self.programs, f"{block.name}: no test can run {line!r}; say why"
                self.programs[program](words)
        else:
            assert block.language in ("", "json", "text"), f"{block.name}: nothing runs {block.language}"

    def cairn(self, words: list[str]) -> None:
        """Run a verb, and leave it running where it is a server's."""
        if words[0] == "serve":
            self.serve(words[1:])
        elif words == ["schedule", "run"]:
            self.schedule(words)
            wait_until(lambda: run(cairn, ["schedule", "health"], "cairn") == 0)
        else:
            assert run(cairn, [FEWER_STEPS.get(word, word) for word in words], "cairn") == 0

    def schedule(self, words: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "pipeline/face")}
        command = [sys.executable, "-m", "cairn.cli.main", *words]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def serve(self, words: list[str]) -> None:
        """Serve at a port that is free, and wait until collections are open."""
        _, self.server, _ = self.stack.enter_context(serving_process(Path.cwd(), *words))

    def address(self) -> str:
        """Return the server's address, after starting one where the page has not."""
        if self.server is None:
            self.serve([])
        assert self.server is not None
        return self.server

    def curl(self, words: list[str]) -> None:
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
            assert response.status == 200
            assert response.read().startswith(b"{")

    def export(self, words: list[str]) -> None:
        for word in words:
            self.patched.setenv(*word.split("=", 1))

    @staticmethod
    def settings(text: str) -> None:
        """Read a block as cairn.toml; its keys must be options of its verbs."""
        path = Path("cairn.toml")
        path.write_text(text, "utf-8")
        verbs = cairn.list_commands(click.Context(cairn))
        for verb in verbs:
            command = cairn.get_command(click.Context(cairn), verb)
            assert command is not None
            read_settings(path, command, verbs)
        path.unlink()

    @staticmethod
    def pip(words: list[str]) -> None:
        """Check that what is installed is a folder of ours, an extra of ours, or a requirement of one."""
        extras = PROJECT["optional-dependencies"]
        required = [line for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]
        names = {re.split("[<>=[]", line)[0] for line in required}
        for word in words[1:]:
            folder, _, asked = word.removesuffix("]").partition("[")
            if folder.startswith("."):
                assert (ROOT / folder / "pyproject.toml").is_file(), word
                assert set(filter(None, asked.split(","))) <= set(extras), word
            else:
                assert word in required or word in names, word

    @staticmethod
    def make(words: list[str]) -> None:
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
            patched.setenv(f"CAIRN_{name}", value)
        yield Workshop(patched, stack)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages name, and with the collection that most of them ask."""
    folder = tmp_path_factory.mktemp("workshop")
    write_corpora(folder)
    with open_workshop(folder):
        assert run(cairn, ["ingest", "articles/", "--collection", "handbook", "--quiet"], "cairn") == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page_run(page: Path, corpora: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpora, tmp_path / "work")
    with open_workshop(folder) as workshop:
        for block in blocks(page):
            if block.reason is None:
                workshop.run(block)


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: f"{block.name}-{block.reason}")
def test_block_that_is_not_run_can_be_read(block: Block) -> None:
    assert block.reason in REASONS
    if block.language == "python":
        ast.parse(block.text)
    else:
        assert block.language == "sh"
        text = re.sub("…", "x", block.text)
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
