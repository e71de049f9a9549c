import json
from typing import Any

import pytest


@pytest.fixture
def drifted(ingest: Any, ingest_options: list[str]) -> list[str]:
    """Ingest six stones, then as many cats and more; return the words of the ingest."""
    stones = {f"s{number}": f"stone path hill {'stone ' * number}" for number in range(6)}
    cats = {f"c{number}": f"the cat sat on the mat {'cat ' * number}" for number in range(12)}
    for texts in (stones, stones | cats):
        ingest("--use-context", id=texts, text=texts.values())
    return ["ingest", "rows.parquet", *ingest_options, "--use-context", "--quiet"]


def test_plan_says_what_is_to_do_and_apply_does_it_once(call: Any, drifted: list[str]) -> None:
    code, out, _ = call("plan", "c")
    assert (code, "18 of 18 documents" in out) == (0, True)
    assert "--apply draws a new context and encodes every document" in out
    assert "re-contextualising (cairn plan) would encode 18 documents" in call("status", "c")[1]
    code, out, _ = call("plan", "c", "--apply", "--json", "--quiet")
    applied = json.loads(out)["applied"]
    assert (code, applied["generation"], applied["documents"], applied["encoded"]) == (0, 3, 18, 18)
    code, out, _ = call("plan", "c", "--apply", "--json", "--quiet")
    again = json.loads(out)
    assert (code, again["context"]["drift"]["verdict"], again["applied"]) == (0, "none", None)
    assert "none: the drift is none; --apply --force does it anyway" in call("plan", "c", "--apply")[1]
    assert call("plan", "c", "--apply", "--force", "--quiet")[0] == 0
    assert json.loads(call("status", "c", "--json")[1])["generation"] == 4
    code, out, _ = call(*drifted, "--json")
    assert (code, json.loads(out)["unchanged"]) == (0, 18)


def test_plan_of_an_encoder_that_reads_no_context_has_nothing_to_do(call: Any, ingest: Any) -> None:
    ingest(id=["a"], text=["stone path"])
    code, out, _ = call("plan", "c", "--apply", "--force")
    assert (code, "the encoder reads no context" in out, "0 of 1 document\n" in out) == (0, True, True)
    assert "no vector depends on the context" in call("status", "c")[1]


def test_plan_late_gives_a_collection_token_vectors_once(call: Any, ingest: Any) -> None:
    ingest("--token-bytes", "0", id=["a", "b"], text=["stone path", "a cat"])
    assert "token vectors   none" in call("status", "c")[1]

    applied = json.loads(call("plan", "c", "--apply", "--late", "--quiet", "--json")[1])["applied"]
    assert (applied["generation"], applied["encoded"]) == (2, 2)
    assert "16 bytes a token" in call("status", "c")[1]
    again = json.loads(call("plan", "c", "--apply", "--late", "--quiet", "--json")[1])
    assert again["applied"] is None
