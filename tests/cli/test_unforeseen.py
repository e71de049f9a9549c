"""An error that Cairn has no sentence for still ends in one, and in a report without anyone's data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cairn.cli.terminal import ESCAPED
from cairn.pipeline import collection
from cairn.pipeline.errors import DamageError, StorageError
from cairn.pipeline.index.files import lance_errors
from cairn.pipeline.index.generation import table_errors

Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("error", [KeyError("canary"), RecursionError("canary"), Panic("canary")])
def test_unforeseen_error_ends_in_a_sentence_and_a_report_without_data(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(collection, "open_collection", fail)
    code, out, err = call("search", "canary", "--collection", "canary")
    assert (code, out) == (1, "")
    assert re.match(rf"error: `cairn search` ended in an unforeseen {type(error).__name__}; [^\n]+\n$", err)
    (report,) = tmp_path.glob("cairn-error-*.txt")
    assert report.stat().st_mode & 0o077 == 0
    assert "in fail" in report.read_text()
    assert "canary" not in err + report.read_text()


@pytest.mark.parametrize("name", ["PanicException", "RustPanic"])
def test_panic_of_lance_while_searching_is_a_storage_error(name: str) -> None:
    panic = type(name, (BaseException,), {"__module__": "pyo3_runtime" if name[0] == "P" else "lancedb"})
    with pytest.raises(StorageError, match=r"^the search failed$"), table_errors("the search"):
        raise panic("secret")


def test_panic_of_lance_is_a_damage_with_a_command() -> None:
    with pytest.raises(DamageError, match="run `cairn verify`"), lance_errors("reading table `chunks`"):
        raise Panic("secret")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_full_disk_behind_the_answer_is_said_in_one_sentence(more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "cairn.cli.main", "models", *more]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 75
    assert done.stderr == "error: no space left where the answer is written; free some and try again\n"


def test_characters_that_a_terminal_lacks_are_escaped_as_json_has_it() -> None:
    text = '{"title": "Vörös 日本 😀"}'
    shown = text.encode("latin-1", ESCAPED)
    assert shown == b'{"title": "V\xf6r\xf6s \\u65e5\\u672c \\ud83d\\ude00"}'
    assert json.loads(shown.decode("latin-1")) == json.loads(text)
