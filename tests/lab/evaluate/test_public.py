"""Cairn's search as a model of MTEB, and the commands that are printed for it."""

from __future__ import annotations

import re
import shlex

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.lab.evaluate.public import SearchModel


class Rows(dict[str, list[str]]):
    """What MTEB hands over: columns by name."""

    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self["id"])


class Task:
    name = "stones"


CORPUS = Rows(id=["a", "b", "c"], text=["the stone path", "a river in spring", ""], title=["", "River", ""])
QUERIES = Rows(id=["q1", "q2"], text=["river in spring", "stone path"])


def test_search_ranks_the_documents_of_a_task(tiny_model_folder, tmp_path):
    model = SearchModel(model=str(tiny_model_folder), cache=str(tmp_path), title_tokens=0)
    model.index(CORPUS, task_metadata=Task())
    found = model.search(QUERIES, top_k=2)
    assert {query: max(scores, key=scores.__getitem__) for query, scores in found.items()} == {
        "q1": "b",
        "q2": "a",
    }
    assert all(len(scores) == 2 for scores in found.values())


@pytest.mark.slow
def test_mteb_scores_the_search(tiny_model_folder):
    mteb = pytest.importorskip("mteb")
    from mteb.mocks.mock_tasks.retrieval import MockRetrievalTask

    result = mteb.evaluate(
        SearchModel(model=str(tiny_model_folder), title_tokens=0), MockRetrievalTask(), cache=None
    )
    assert 0 < result.task_results[0].get_score() <= 1


def test_printed_commands_are_python_with_the_chosen_settings(capsys):
    assert run(cairn, ["evaluate", "--public", "--title-tokens", "8"], "cairn") == 0
    told = capsys.readouterr().out
    commands = [line for line in told.splitlines() if line.startswith("env ")]
    for name, command in zip(("BEIR", "LongEmbed"), commands, strict=True):
        code = shlex.split(command)[-1]
        compile(code, name, "exec")
        assert re.search(rf"SearchModel\(model='cairn-minilm', title_tokens=8\), .*{name}", code)


def test_evaluate_without_folder_or_public_is_refused(capsys):
    assert run(cairn, ["evaluate"], "cairn") == 2
    assert "Missing argument 'FOLDER...'" in capsys.readouterr().err
