"""What `cairn repair` says of documents it gives up, and what is said where it cannot help."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index.names import COPIES


def test_repair_that_loses_every_document_says_so_and_how_to_encode_them_again(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    for path in (tmp_path / "cairn-data" / "c" / "lance" / "documents.lance" / "data").iterdir():
        path.unlink()
    code, out, _ = call("repair", "c")
    first, *_, last = out.splitlines()
    assert (code, first) == (0, "EVERY document of collection 'c' is lost")
    assert last.startswith("3 document(s) were given up; run `cairn ingest SOURCE...")
    advised = shlex.split(last.partition("run `")[2].partition("`")[0].replace("SOURCE...", corpus))
    assert call(*advised[1:], *ingest_options[2:], "--quiet")[0] == 0
    assert json.loads(call("status", "c", "--json")[1])["documents"] == 3


@pytest.mark.parametrize("name", ["context.arrow", "clusters.arrow"])
def test_context_that_no_generation_has_whole_leads_to_a_repair_that_says_what_is_left(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, name: str
) -> None:
    ingest = ("ingest", corpus, *ingest_options, "--use-context", "--quiet")
    assert call(*ingest)[0] == 0
    generation = tmp_path / "cairn-data" / "c" / "generations" / "00000001"
    whole = (generation / name).read_bytes()
    (generation / name).write_bytes(whole[:-1])
    assert "run `cairn repair c`" in call("verify", "c")[2]
    (tmp_path / "cairn-data" / "c" / COPIES / "00000001" / name).write_bytes(whole[:-1])
    search = ("search", "stone", "--collection", "c")
    for words in (ingest, search, ("verify", "c"), ("plan", "c", "--apply", "--force")):
        code, _, err = call(*words)
        assert (code, "run `cairn repair" in err) == (1, True), words
    code, _, err = call("repair", "c")
    assert (code, "ingest the sources again" in err) == (1, True)
