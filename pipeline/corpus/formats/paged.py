"""Files of pages, such as those of PDF and Office: a child process reads each of them, page by page.

On a damaged file a library may take all memory, never end, or end the process. So a process that was spawned
for it reads, and sends a line of JSON a page. A page that fails, or takes longer than ``PAGE_SECONDS``, is
quarantined with its number, and where it has ended the child, another one goes on behind it. A file that
cannot be opened is one quarantined row. A child reads many files, as a start takes longer than a small file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, NamedTuple, cast

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.file_kind import HEAD, no_kind, other_kind
from cairn.pipeline.corpus.formats.format import PAGE_BREAK, SourceFile, damage_of
from cairn.pipeline.corpus.formats.text import (
    TITLE_CHARACTERS,
    TITLE_CHARACTERS_READ,
    DocumentFormat,
    TextDocument,
    heading,
)
from cairn.pipeline.corpus.quarantine import Reason
from cairn.pipeline.errors import install_command
from pyarrow.fs import LocalFileSystem
from typing_extensions import override

PAGE_SECONDS: Final = 60
FILE_SECONDS: Final = 1_800
MEMORY_BYTES: Final = 2 << 30
"""How much memory a child may take for what it reads, where the system can limit it, as Linux does."""
MAX_ENDED: Final = 3
"""How many pages of a file may each end a child before the pages behind them are given up."""
FILES_OF_A_CHILD: Final = 64
"""How many files a child reads, so that what a library leaks stays small."""
_PROGRAM: Final = "from cairn.pipeline.corpus.formats.paged import serve; serve(%d)"
_DROPPED: Final = {*range(32), 0x7F, 0xFFFE, 0xFFFF} - {ord("\t"), ord("\n")}
_CLEANED: Final = dict.fromkeys(_DROPPED, "") | {ord("\v"): "\n", ord("\f"): "\n"}


class PageWithoutText(Exception):  # noqa: N818 (it is no error of the page)
    """A page shows something and holds no text, as a scanned one does."""


class UnreadableError(ValueError):
    """A file cannot be read for a reason that its reader knows."""


Page = Callable[[], str] | str | ValueError
"""The text of a page, what returns it, or, behind all pages, an error that says what of the file is lost."""


class Opened(NamedTuple):
    """A file that was opened: its title, empty where it has none, its pages, and a guessed encoding."""

    title: str
    pages: Iterable[Page]
    encoding: str = ""


class PagedFormat(DocumentFormat):
    """A format whose files are a document of pages each; ``package`` is what reads it and may be missing."""

    package: ClassVar[str | None] = None
    has_headings: ClassVar[bool] = True
    """Whether headings are written as in Markdown, so that the first can be the title."""

    @abstractmethod
    def open(self, path: str) -> Opened:
        """Open a file of this machine, in the child; what is raised tells its damage, or that of a page."""

    @override
    def missing(self) -> str | None:
        is_there = self.package is None or find_spec(self.package) is not None
        return None if is_there else f"to read them, run {install_command('documents')}"

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch]:
        """Yield the document, and a refused row for each of its pages that has no text to read."""
        with _on_disk(file) as path:
            suffix = PurePosixPath(file.path.lower()).suffix
            found = _read_in_child(suffix, path, config.max_document_bytes, self.unit or "page")
        text = PAGE_BREAK.join(found.pages).lstrip("\n")
        title = found.title or (heading(text[:TITLE_CHARACTERS_READ]) if self.has_headings else "")
        document = TextDocument(title, text, encoding=found.encoding)
        yield document.rows(file, types, config, [found.refused, *found.faults])


@contextlib.contextmanager
def _on_disk(file: SourceFile) -> Generator[str]:
    """Give the path of a file on this machine, of a copy where it is elsewhere."""
    if isinstance(file.filesystem, LocalFileSystem):
        yield file.path
        return
    with tempfile.NamedTemporaryFile(prefix="cairn-") as copy:
        with file.open() as stream:
            shutil.copyfileobj(stream, copy)
        copy.flush()
        yield copy.name


@dataclass(kw_only=True, slots=True)
class _Found:
    """What a child has sent of a file; ``refused`` says why there is nothing."""

    unit: str
    title: str = ""
    encoding: str = ""
    pages: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])
    refused: str | None = None

    def fail(self, reason: str, detail: str) -> None:
        """Note that there is no text of the next page."""
        self.pages.append("")
        self.faults.append(f"{reason} {self.unit} {len(self.pages)}: {detail}")


def _read_in_child(suffix: str, path: str, max_characters: int, unit: str) -> _Found:
    """Read a file with as many children as it ends, and no more text than the row checks refuse."""
    found = _Found(unit=unit)
    if Path(path).stat().st_size == 0 and Path(path).is_file():
        found.refused = f"{Reason.DAMAGED_DOCUMENT} the file is empty"
        return found
    deadline, num_characters = time.monotonic() + FILE_SECONDS, 0
    for _ in range(MAX_ENDED):
        child, is_open = _started(), False
        with child:
            for answer in child.ask(suffix, path, len(found.pages), PAGE_SECONDS, max_characters):
                is_open = is_open or "title" in answer
                if "title" in answer:
                    found.title, found.encoding = answer["title"], answer["encoding"]
                elif "refused" in answer:
                    found.refused = f"{Reason.DAMAGED_DOCUMENT} {answer['refused']}"
                elif "lost" in answer:
                    found.faults.append(f"{Reason.DAMAGED_PAGE} {answer['lost']}")
                elif "fault" in answer:
                    found.fail(*answer["fault"])
                else:
                    found.pages.append(answer["text"])
                    num_characters += len(answer["text"])
                if num_characters > max_characters:
                    return found
                if time.monotonic() > deadline:
                    found.fail(
                        Reason.DAMAGED_PAGE, f"it and those behind it: not read within {FILE_SECONDS} s"
                    )
                    return found
        if child.is_idle:
            return found
        if not is_open:
            found.refused = f"{Reason.DAMAGED_DOCUMENT} it cannot be opened: {child.ended_by}"
            return found
        found.fail(Reason.DAMAGED_PAGE, child.ended_by)
    found.fail(Reason.DAMAGED_PAGE, f"it and those behind it are not read, as {MAX_ENDED} ended their reader")
    return found


class _Child:
    """A process that reads one file after the other; it is used again once it has sent a whole file."""

    def __init__(self) -> None:
        self.is_idle = False
        self.owner = os.getpid()
        self.ended_by = ""
        self._num_files = 0
        # As this process finds modules, but not by its working folder; threads would each take memory.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-P", "-c", _PROGRAM % MEMORY_BYTES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def ask(self, *request: object) -> Iterator[Mapping[str, Any]]:
        """Yield what the child says of a file; it is idle once it has said all."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.is_idle = False
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line == b"\n":
                    self.is_idle = True
                    return
                yield json.loads(line)

    def has_ended(self) -> bool:
        """Whether the process is gone, as where the machine was short of memory while it waited."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Close this end of its pipes; nothing waits in them between two files."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def end(self) -> None:
        """End the process where it has not ended by itself."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        is_late = self._process.returncode == -signal.SIGALRM
        self.ended_by = (
            f"reading it takes longer than {PAGE_SECONDS} s"
            if is_late
            else f"its reader failed; it is damaged, or needs more than {MEMORY_BYTES >> 20:,} MiB of memory"
        )

    def __enter__(self) -> None:
        self._num_files += 1

    def __exit__(self, *_: object) -> None:
        if self.is_idle and self._num_files < FILES_OF_A_CHILD:
            _idle.append(self)
        else:
            self.end()


_idle: Final = list[_Child]()


def _started() -> _Child:
    """Return a child that waits for work; one of the process that this one was forked from is another's."""
    while _idle:
        child = _idle.pop()
        if child.owner == os.getpid() and not child.has_ended():
            return child
        child.close()
    return _Child()


@atexit.register
def end_children() -> None:
    """End the processes that wait for files."""
    while _idle:
        _idle.pop().end()


def serve(memory_bytes: int) -> None:
    """Answer requests, in the child: a line a page, and an empty one at the end of a file."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no answer
    from cairn.pipeline.corpus.formats import FORMAT_OF

    _limit_memory(memory_bytes)
    for line in sys.stdin:
        suffix, *request = json.loads(line)
        for answer in _answers(suffix, cast(PagedFormat, FORMAT_OF[suffix]), *request):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        answers.write("\n")
        answers.flush()


def _limit_memory(more_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, taken + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answers(
    suffix: str, reader: PagedFormat, path: str, num_read: int, page_seconds: int, max_characters: int
) -> Iterator[Mapping[str, object]]:
    """Yield the title and then each page behind those that were read; without memory the child ends."""
    signal.alarm(page_seconds)  # ends this process
    try:
        opened = _opened(suffix, reader, path)
    except UnreadableError as error:
        yield {"refused": str(error)}
        return
    finally:
        signal.alarm(0)
    title = cleaned(opened.title).strip()[:TITLE_CHARACTERS]
    yield {"title": title, "encoding": opened.encoding}
    for page in islice(opened.pages, num_read, None):
        signal.alarm(page_seconds)
        try:
            if isinstance(page, ValueError):
                answer = {"lost": damage_of(page)}
            else:
                text = page if isinstance(page, str) else page()
                answer = {"text": cleaned(text).strip("\n")[: max_characters + 1]}
        except MemoryError:
            raise
        except PageWithoutText as told:
            answer = {"fault": (Reason.PAGE_WITHOUT_TEXT, damage_of(told))}
        except Exception as error:  # noqa: BLE001 (a library may raise anything on a damaged one)
            answer = {"fault": (Reason.DAMAGED_PAGE, f"it cannot be read: {damage_of(error)}")}
        yield answer
    signal.alarm(0)


def _opened(suffix: str, reader: PagedFormat, path: str) -> Opened:
    """Open a file; :class:`UnreadableError` says why it cannot be."""
    with Path(path).open("rb") as file:
        head = file.read(HEAD)
    if told := other_kind(head, suffix, reader.kinds):
        raise UnreadableError(told)
    try:
        return reader.open(path)
    except (MemoryError, UnreadableError):
        raise
    except Exception as error:
        told = no_kind(head, suffix, reader.kinds)
        raise UnreadableError(told or f"it cannot be read as {suffix}: {damage_of(error)}") from error


def cleaned(text: str) -> str:
    """Make lines end as usual; drop control characters and halves of characters, which no text has."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CLEANED)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
