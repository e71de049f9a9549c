"""Formats whose files are a document each, and the first of them: Markdown and plain text.

A document's id is its path below the source. The text of Markdown is the file, with headings and without
front matter: a YAML mapping between two lines of `---` at its start. The title is the `title` of the front
matter, else the first heading, else the name of the file. The other keys of the front matter are columns;
``cairn.pipeline.corpus.schema`` says what other files have there.

Keys are read as YAML 1.2 names scalars: a date stays the text that it is, `yes` is a text, too. Nothing but
scalars and lists of them is built, so no tag, alias or merge key can make a small file large. A block that is
no mapping, such as a text between two rules, is no front matter.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final, NamedTuple

import pyarrow as pa
import yaml
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Format, SourceFile
from cairn.pipeline.corpus.formats.values import as_column, is_utf8, type_of
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.types import RESERVED_COLUMNS
from typing_extensions import override

DOCUMENT_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.string()), pa.field("title", pa.string()), pa.field("text", pa.large_string())]
)
_HEADING: Final = re.compile(rb"#{1,6}[ \t]+(.*)", re.DOTALL)
_UNDERLINE: Final = re.compile(rb"={3,}[ \t]*")
_BOM: Final = b"\xef\xbb\xbf"
TITLE_BYTES: Final = 64 << 10
"""How much of the start of a file is searched for its title."""
FRONT_MATTER_BYTES: Final = 64 << 10
"""How long a block may be; a longer one is text."""
MAX_KEY_CHARACTERS: Final = 256
_BLOCK: Final = re.compile(rb"---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_OWN_NAMES: Final = (RESERVED_COLUMNS - {"title"}) | {"id"}
_CORE_SCHEMA: Final[Mapping[str, tuple[str, str]]] = {
    "null": (r"(?:~|null|Null|NULL|)$", "~nN"),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]{0,17})$", "-+0123456789"),
    "float": (r"[-+]?[0-9]{1,15}(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?$", "-+0123456789"),
}
"""Pattern and first characters of each kind of scalar. A leading zero makes a text, as in CSV."""
_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9]")


class Document(NamedTuple):
    """A file that was read; ``values`` are its further columns. Bytes are checked to be UTF-8 later.

    An empty title stands for the name of the file.
    """

    title: str
    text: str | bytes
    values: Mapping[str, Any] = {}


class DocumentFormat(Format):
    """A format whose files are a document each."""

    is_typed = False
    is_document = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns that every document has; the file is not opened."""
        return Footer(schema=DOCUMENT_SCHEMA, num_rows=1)

    @abstractmethod
    def document(self, file: SourceFile, raw: bytes) -> Document:
        """Make a document of the bytes of a file."""

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch]:
        """Yield the one document; of a file that is too large, only so much that the row checks refuse it."""
        with file.open() as stream:
            raw = stream.read(config.max_document_bytes + 1)
        read = Document("", raw) if len(raw) > config.max_document_bytes else self.document(file, raw)
        title = read.title or PurePosixPath(file.relative).stem
        columns = {
            "id": as_column([file.relative], pa.string()),
            "title": as_column([title], pa.string()),
            "text": as_column([read.text], pa.string())
            if isinstance(read.text, str)
            else pa.array([read.text], pa.large_binary()).view(pa.large_string()),
        }
        for name, arrow_type in types.items():
            if name not in columns:
                value = read.values.get(name)
                is_one = pa.types.is_list(arrow_type) and value is not None and not isinstance(value, list)
                columns[name] = as_column([[value] if is_one else value], arrow_type)
        yield pa.RecordBatch.from_arrays([columns[name] for name in types], names=[*types])


class TextFormat(DocumentFormat):
    """Reads Markdown and plain text files."""

    suffixes = (".md", ".markdown", ".txt")

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns of every document and those of its front matter, which is all that is read."""
        if _is_plain(file):
            return super().read_footer(file, config)
        with file.open_stream() as stream:
            front = read_front_matter(stream.read(FRONT_MATTER_BYTES).removeprefix(_BOM))
        fields = [
            pa.field(key, type_of(value))
            for key, value in front.values.items()
            if key not in DOCUMENT_SCHEMA.names
        ]
        return Footer(schema=pa.schema([*DOCUMENT_SCHEMA, *fields]), num_rows=1, fault=front.fault)

    @override
    def document(self, file: SourceFile, raw: bytes) -> Document:
        raw = raw.removeprefix(_BOM)
        if _is_plain(file):
            return Document("", raw)
        front = read_front_matter(raw)
        text = raw[front.text_start :].lstrip(b"\r\n") if front.text_start else raw
        named = front.values.get("title")
        is_title = isinstance(named, str | int | float) and not isinstance(named, bool)
        title = str(named).strip() if is_title else ""
        heading = _heading(text[:TITLE_BYTES].splitlines())
        return Document(title or heading.decode("utf-8", "replace"), text, front.values)


def _is_plain(file: SourceFile) -> bool:
    return file.path.lower().endswith(".txt")


def _heading(lines: Sequence[bytes]) -> bytes:
    """Return the first heading, empty where there is none. No pattern here can backtrack."""
    for line, below in zip_longest(lines, lines[1:], fillvalue=b""):
        if (marked := _HEADING.match(line)) and (text := marked[1].strip(b" \t#")):
            return text
        if line[:1].strip() and _UNDERLINE.fullmatch(below):
            return line.strip()
    return b""


class FrontMatter(NamedTuple):
    """The keys of a file's front matter, where its text begins, and why a block could not be read."""

    values: Mapping[str, Any]
    text_start: int
    fault: str | None = None


class _Loader(yaml.SafeLoader):
    """Composes nodes; its C variant ends the process on deep nesting."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


for _tag, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), [*_first])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("$"), [""])


def read_front_matter(raw: bytes) -> FrontMatter:
    """Read the front matter at the start of a file.

    A key that is a name of Cairn's own, such as `id` or `text`, gets the prefix `front_matter_`. A value that
    is neither a scalar nor a list of scalars is an empty dictionary. Where the block is not YAML, ``fault``
    says why, and the text is the whole file.
    """
    found = _BLOCK.match(raw[:FRONT_MATTER_BYTES]) if raw.startswith(b"---") else None
    if found is None:
        return FrontMatter({}, 0)
    try:
        node = yaml.compose(found[1].decode(), Loader=_Loader)
    except UnicodeDecodeError:
        return FrontMatter({}, 0)  # the row is refused
    except RecursionError:
        return FrontMatter({}, 0, "it is nested too deeply")
    except yaml.YAMLError as error:
        return FrontMatter({}, 0, _fault(error))
    if node is None:
        return FrontMatter({}, found.end())
    if not isinstance(node, yaml.MappingNode):
        return FrontMatter({}, 0)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
        if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isprintable() and is_utf8(key)):
            fault = f"a key must be printable text of at most {MAX_KEY_CHARACTERS} characters"
            return FrontMatter({}, 0, fault)
        values[f"front_matter_{key}" if key in _OWN_NAMES else key] = _value(value_node)
    return FrontMatter(values, found.end())


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return [_scalar(each) for each in node.value]
    return {}


def _scalar(node: yaml.ScalarNode) -> str | bool | int | float | None:
    kind, written = node.tag.rpartition(":")[2], node.value
    pattern, _ = _CORE_SCHEMA.get(kind, ("", ""))
    if not pattern or _LEADING_ZERO.match(written) or not re.match(pattern, written):
        return written  # a text, or one that an explicit tag calls something else
    if kind == "null":
        return None
    if kind == "bool":
        return written.lower() == "true"
    return int(written) if kind == "int" else float(written)


def _fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        # The first line of the file is the one of three hyphens.
        return f"line {error.problem_mark.line + 2}: {error.problem}"
    return str(error).splitlines()[0]
