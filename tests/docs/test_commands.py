"""The command blocks of README and guide, run in order, page by page, on a tiny corpus.

A block that cannot run here is preceded by a comment that names one of :data:`REASONS`; it is read all the
same. ``pytest tests/docs/test_commands.py --collect-only -q -k not_run`` lists them.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cairn.cli.main import cairn, run

from tests.docs.pages import GUIDE, README, ROOT, Block, blocks
from tests.docs.workshop import open_workshop, write_corpora

REASONS = {
    "docker": "needs a Docker engine; tests/test_compose.py runs the services' commands",
    "download": "needs a model that no package brings",
    "gpu": "needs a GPU for an hour; tests/jobs/test_train_default.py runs a small one",
    "open": "would serve other machines",
    "kubernetes": "needs a cluster; tests/jobs/test_kustomize.py reads what it would get",
    "ray": "needs a Ray cluster; tests/jobs/ray_cluster runs one",
    "s3": "needs a bucket; tests/jobs/test_store_index.py has a local one",
}
PAGES = [README, *GUIDE]
BLOCKS = [block for page in PAGES for block in blocks(page)]
LEFT_OUT = [block for block in BLOCKS if block.reason is not None]


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


def test_pages_run_something() -> None:
    run_pages = {
        block.page for block in BLOCKS if block.reason is None and block.language in ("sh", "python")
    }
    not_run = {page.stem for page in PAGES} - {page.stem for page in run_pages}
    assert not_run == {"object-store", "ray", "containers"}


def test_curl_shows_every_kind_of_address() -> None:
    page = (ROOT / "docs" / "guide" / "serve.md").read_text("utf-8")
    shown = re.findall(r"^curl -s localhost:8400(\S+)", page, re.MULTILINE)
    assert {re.sub("handbook|guides/passwords", "{}", path) for path in shown} == {
        "/v1/collections",
        "/v1/collections/{}/search",
        "/v1/collections/{}/documents/{}",
        "/v1/collections/{}/lineage/{}",
        "/v1/vector_stores/{}/search",
        "/v1/embeddings",
    }
