"""What an error that Cairn has no sentence for becomes: a sentence, and a file that says where it happened.

The last border of every verb and job. The file holds types and places in the code, and no message: a message
may quote a document, a query or a key.
"""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import install_command

MAX_FRAMES: Final = 40
MAX_LINES: Final = 400
"""A recursion without end has a thousand frames, which say the same."""


def sentence_of(error: BaseException, verb: str) -> str:
    """Write a report and return the sentence that names it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return (
            f"the package {package} must be installed, got none; install Cairn again with its dependencies, "
            f"for example {install_command('cpu')}"
        )
    kind = type(error).__name__
    try:
        report = _write(error, verb)
    except OSError:
        return f"`{verb}` ended in an unforeseen {kind}, and no report of it could be written"
    return (
        f"`{verb}` ended in an unforeseen {kind}; nothing published was changed. {report} says where in the "
        "code, without your data: please report it"
    )


def _write(error: BaseException, verb: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="cairn-error-", suffix=".txt")
    lines = [
        f"cairn {version('cairn-index')}, Python {platform.python_version()}, {platform.platform()}",
        verb,
    ]
    cause: BaseException | None = error
    while cause is not None and len(lines) < MAX_LINES:
        lines.append(f"{type(cause).__module__}.{type(cause).__qualname__}")
        lines += [
            f"  {frame.filename}:{frame.lineno} in {frame.name}"
            for frame in traceback.extract_tb(cause.__traceback__)[-MAX_FRAMES:]
        ]
        cause = cause.__cause__ or cause.__context__
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return Path(name)
