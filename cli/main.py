"""Entry points `cairn` and `ingest`: find the verb, run it, turn an error into a sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 done with quarantined rows, 75 try again, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from io import TextIOWrapper
from types import FrameType
from typing import Final, NoReturn

import click
from cairn.cli.settings import config_option, name_variables, variable_prefix
from cairn.cli.terminal import ESCAPED, echo, printable
from cairn.pipeline.errors import CairnError, DiskFullError, UsageError, install_command, is_panic
from cairn.pipeline.options import shown
from typing_extensions import override

MAX_FRAMES: Final = 40
MAX_LINES: Final = 400
"""Of a report: a recursion without end has a thousand frames, which say the same."""
_VERBS = {
    "ingest": "Index a corpus, or what changed in it since the last time.",
    "search": "Search a collection; answers are documents with their best passages.",
    "serve": "Serve the search API over HTTP.",
    "mcp": "Serve a collection to a language model as MCP tools, on stdin and stdout.",
    "keys": "Make, list and revoke API keys of the server.",
    "list": "List the collections there are.",
    "status": "Show what a collection holds and how it was built.",
    "lineage": "Show where a document came from: file, row, run, model, context.",
    "plan": "Show whether the corpus has drifted from its context, and give it a new one.",
    "switch": "Let a name answer from another collection, and back.",
    "compare": "Show what would change if one collection took another's place.",
    "evaluate": "Score systems on judged corpora, and say which configuration to use.",
    "pretrain": "Pretrain an encoder on text, before it is fine-tuned.",
    "train": "Fine-tune an encoder for landmarks and context on your own pairs.",
    "train-landmarks": "Teach a model to pool landmarks, from texts alone.",
    "experiment": "Measure a claim of the papers, on your own pairs and judged sets.",
    "compress": "Prune and quantise a model, and measure what that costs.",
    "distill": "Let a smaller model follow a larger one on plain texts.",
    "schedule": "Run ingests at the times of cron expressions.",
    "submit": "Run a job from a file on a Ray cluster, and follow it.",
    "models": "List encoders, and fetch one from the Hugging Face hub.",
    "sample": "Write a sample corpus made from Python's own documentation.",
    "verify": "Check every stored file of a collection against its hashes.",
    "repair": "Bring a damaged collection back to its last good state.",
    "compact": "Merge small files and drop what no generation needs.",
    "retype": "Give metadata columns other types.",
    "repartition": "Cut a collection into another number of partitions.",
    "delete": "Delete documents by id or by filter.",
    "drop": "Delete a collection.",
}
_HOMES = {
    "status": ("list",),
    "mcp_stdio": ("mcp",),
    "cluster": ("submit",),
    "upkeep": ("compact", "delete", "drop", "lineage", "repair", "repartition", "retype", "switch", "verify"),
    "lab.compare": ("compare",),
    "lab.compress": ("compress",),
    "lab.evaluate": ("evaluate",),
    "lab.training": ("distill", "experiment", "pretrain", "train", "train-landmarks"),
}
_MODULES = {verb: module for module, verbs in _HOMES.items() for verb in verbs}
"""Where a verb stands, if not in a module of its name."""
_INTERRUPTED = 130
_FAILED = 1
_USAGE = 2
_LONG_WORD = re.compile(r"\S{200,}")
"""A value that click repeats in its sentence."""


class _LazyGroup(click.Group):
    """A group that imports a verb's module only when it is called, so that `--help` answers at once."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _verb(cmd_name) if cmd_name in _VERBS else None

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            raise UsageError(f"there is no verb {shown(args[0])}{_meant(args[0])}")
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@cache
def _verb(name: str) -> click.Command:
    """Import a verb, and give it ``--config`` and the variables of its options."""
    module = importlib.import_module(f"cairn.cli.{_MODULES.get(name, name)}")
    command: click.Command = getattr(module, "list_collections" if name == "list" else name.replace("-", "_"))
    command.params.append(config_option())
    name_variables(command, variable_prefix(name))
    return command


def _meant(word: str) -> str:
    close = get_close_matches(word, _VERBS, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; `cairn --help` lists them"


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="cairn-index", prog_name="cairn")
def cairn() -> None:
    """Contextual retrieval indexing: documents in, searchable passages out."""


def run(command: click.Command, arguments: Sequence[str], name: str) -> int:
    """Run a command and return its exit code; no error a user can cause ends in a traceback."""
    try:
        outcome = command.main(args=list(arguments), prog_name=name, standalone_mode=False)
    except BaseException as error:  # noqa: BLE001 - no verb ends in a traceback
        return _told(error, name, arguments)
    return outcome if isinstance(outcome, int) else 0


def _told(error: BaseException, name: str, arguments: Sequence[str]) -> int:
    """Say in a sentence how a command ended, and return its exit code."""
    match error:
        case click.exceptions.Abort() | KeyboardInterrupt():
            echo("\ninterrupted; finished work is kept, the same command goes on from there", err=True)
            return _INTERRUPTED
        case click.ClickException():
            vars(error)["message"] = printable(_LONG_WORD.sub(lambda word: f"{word[0][:80]}…", error.message))
            error.show()
            return error.exit_code
        case (
            OSError(errno=errno.ENAMETOOLONG, filename=path)
            | CairnError(__cause__=OSError(errno=errno.ENAMETOOLONG, filename=path))
        ):
            echo(f"error: a path must have names of at most 255 bytes, got {shown(path)}", err=True)
            return _USAGE
        case CairnError():
            echo(f"error: {error}", err=True)
            return error.exit_code
        case MemoryError():
            echo("error: out of memory; nothing published was changed, finished work is kept", err=True)
            return _FAILED
        case BrokenPipeError():
            # The reader of our output (`| head`) is gone: that is its right, not an error.
            _leave_stdout()
            return 0
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            _leave_stdout()
            echo("error: no space left where the answer is written; free some and try again", err=True)
            return DiskFullError.exit_code
        case _:
            if not isinstance(error, Exception) and not is_panic(error):
                raise error
            return _unforeseen(error, name, arguments)


def _leave_stdout() -> None:
    """Keep Python's own flush at exit quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(error: BaseException, name: str, arguments: Sequence[str]) -> int:
    """Say in a sentence what no sentence was foreseen for, with a file that says where it happened."""
    verb = f"{name} {next((argument for argument in arguments if argument in _VERBS), '')}".strip()
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        said = (
            f"the package {error.name.partition('.')[0]} must be installed, got none; install Cairn again "
            f"with its dependencies, for example {install_command('cpu')}"
        )
    else:
        try:
            said = (
                f"`{verb}` ended in an unforeseen {kind}; nothing published was changed. "
                f"{_report(error, verb)} says where in the code, without your data: please report it"
            )
        except OSError:
            said = f"`{verb}` ended in an unforeseen {kind}, and no report of it could be written"
    echo(f"error: {said}", err=True)
    return _FAILED


def _report(error: BaseException, verb: str) -> str:
    """Write types and places in the code into a file, and no message: it may quote a document or a key."""
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
    descriptor, name = tempfile.mkstemp(prefix="cairn-error-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return name


def main() -> None:
    """Run `cairn VERB …`."""
    _run_process(sys.argv[1:])


def ingest_main() -> None:
    """Run `ingest …`, the same as `cairn ingest …`."""
    _run_process(["ingest", *sys.argv[1:]])


def _run_process(arguments: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)
    # A stopped job and a drained machine send SIGTERM, which ends a verb as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # nohup and the like ignore it
        signal.signal(signal.SIGINT, _interrupt)
    sys.exit(run(cairn, arguments, "cairn"))


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """End a verb; a second signal ends the process at once, which whatever is stored outlives."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
