"""The programs of ``examples/`` run."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cairn
import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel

from tests.embedding_server import EmbeddingServer

FOLDER = Path(__file__).parents[2] / "examples"
QUESTION = "granite and slate"


@pytest.fixture
def stones(stones_root: Path, monkeypatch: pytest.MonkeyPatch) -> cairn.Collection:
    monkeypatch.setenv("CAIRN_ROOT", str(stones_root))
    return cairn.open_collection("stones")


@pytest.fixture
def articles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> Path:
    """A folder of two articles, beside an empty root and the settings of a tiny model."""
    monkeypatch.setenv("CAIRN_ROOT", str(tmp_path / "root"))
    create = cairn.Collection.create
    encoder = {"model": str(tiny_model_folder), "landmark_interval": 16, "window_tokens": 64}
    settings = {
        "encoder": {**encoder, "window_overlap_tokens": 16},
        "cluster": {"num_clusters": 1},
        "context": {"context_documents": 2, "max_document_tokens": 32},
    }
    monkeypatch.setattr(cairn.Collection, "create", lambda name: create(name, settings=settings))
    folder = tmp_path / "articles"
    folder.mkdir()
    for name in ("granite", "slate"):
        (folder / f"{name}.md").write_text(f"# {name}\n\nAll about {name}.\n")
    return folder


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / name))


def run(name: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_prompt_holds_the_passages_and_a_model_answers_it(
    stones: cairn.Collection, embedding_server: EmbeddingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("rag_answer.py", "stones", QUESTION)
    prompt = capsys.readouterr().out
    hits = stones.search(QUESTION, max_characters=6_000).hits
    assert hits[0].passages[0].text in prompt
    embedding_server.answer = lambda asked: str(asked.count("\n\n["))  # the sources that it is given
    run("rag_answer.py", "stones", QUESTION, "--endpoint", f"{embedding_server.host}/v1")
    assert capsys.readouterr().out == f"{len(hits)}\n"


def test_nightly_sync_follows_its_folder(articles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            run("nightly_sync.py", "handbook", str(articles))
        said.append(capsys.readouterr().out)
        (articles / "slate.md").unlink(missing_ok=True)
    assert said == ["2 indexed, 0 deleted, 0 unchanged\n", "0 indexed, 1 deleted, 1 unchanged\n"]


def test_chain_gives_the_model_the_passages(stones: cairn.Collection) -> None:
    seen: list[Any] = []

    class Model(FakeListChatModel):
        def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            seen.extend(messages)
            return super()._call(messages, *args, **kwargs)

    chain = load("langchain_chain.py")["answer_chain"](stones, Model(responses=["on the hill"]))
    assert chain.invoke(QUESTION) == "on the hill"
    assert stones.search(QUESTION, top_k=6).hits[0].passages[0].text in seen[0].content


def test_reranking_says_where_each_document_was(stones: cairn.Collection) -> None:
    class ByLength:
        """Scores a passage by its length."""

        def score(self, query: str, texts: Sequence[str]) -> np.ndarray:
            return np.array([len(text) / 1e4 for text in texts])

    found = load("rerank.py")["places"](stones, QUESTION, ByLength())
    first = [hit.doc_id for hit in stones.search(QUESTION).hits]
    assert all(first[before - 1] == doc_id for doc_id, before in found if before)
    assert [doc_id for doc_id, _ in found] != first


def test_dagster_asset_syncs(articles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster itself is too large to be a requirement of tests: its names stand here."""
    fake = ModuleType("dagster")
    fake.asset = lambda function: function  # type: ignore[attr-defined]
    fake.MaterializeResult = SimpleNamespace  # type: ignore[attr-defined]
    fake.ScheduleDefinition = SimpleNamespace  # type: ignore[attr-defined]
    fake.RetryRequested = RuntimeError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dagster", fake)
    monkeypatch.setenv("ARTICLES", str(articles))
    module = load("dagster_asset.py")
    result = module["handbook"]()
    assert result.metadata["indexed"] == 2
    assert module["nightly"].target == [module["handbook"]]
