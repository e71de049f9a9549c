"""Formats whose files are a document each, and the first of them: Markdown and plain text.

A document's id is its path below the source. The text of Markdown is the file, with headings, but without
pictures that are encoded in it and without front matter at its start: YAML between two lines of `---`, TOML
between two of `+++`, or an object of JSON. The title is the `title` of the front matter, else the text of the
first heading as CommonMark has it, else the name of the file. The other keys of the front matter are columns.

Keys are read as YAML 1.2 names scalars: a date stays the text that it is, `yes` is a text, too. Nothing but
scalars and lists of them is built, and nothing of an alias, so no tag, alias or merge key can make a small
file large. A block that is no mapping, such as a text between two rules, is no front matter.
"""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import unescape
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import yaml
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import (
    FAULT,
    OBJECT,
    OBJECTS,
    Decimals,
    WrittenNumber,
    batch_of,
    role_names,
    type_of,
)
from cairn.pipeline.corpus.formats.file_kind import MARKUP, TEXT, other_kind
from cairn.pipeline.corpus.formats.format import (
    ENCODING,
    HEADING_ID,
    Footer,
    Format,
    SourceFile,
    encoding_of,
    guessed_text,
    is_utf8,
)
from cairn.pipeline.corpus.quarantine import Reason
from cairn.pipeline.types import RESERVED_COLUMNS
from markdown_it import MarkdownIt
from typing_extensions import override

DOCUMENT_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.string()), pa.field("title", pa.string()), pa.field("text", pa.large_string())]
)
TITLE_BYTES: Final = 64 << 10
"""How much of the start of a file is searched for its title."""
TITLE_CHARACTERS: Final = 1_000
FRONT_MATTER_BYTES: Final = 64 << 10
"""How long a block may be; a longer one is text."""
MAX_KEY_CHARACTERS: Final = 256
_BLOCK: Final = re.compile(
    rb"(?:---[ \t]*\r?\n(?P<yaml>.*?)^(?:---|\.\.\.)|\+\+\+[ \t]*\r?\n(?P<toml>.*?)^\+\+\+)"
    rb"[ \t]*(?:\r?\n|\Z)",
    re.DOTALL | re.MULTILINE,
)
_JSON_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]')
"""A text of JSON, with a colon behind it where it is a key, or a brace."""
_DATA_URI: Final = re.compile(rb"(data:[\w.+/-]+;base64,)[A-Za-z0-9+/=%]{64,}")
_HTML_HEADING: Final = re.compile(r"<h1\b[^>]{0,200}>(.{1,1000}?)</h1>", re.IGNORECASE | re.DOTALL)
_OWN_NAMES: Final = (RESERVED_COLUMNS - {"title"}) | {"id"}
_SCALARS: Final[Mapping[str, Callable[[str], Any]]] = {
    r"~|null|Null|NULL|": lambda _: None,
    r"true|True|TRUE|false|False|FALSE": lambda written: written.lower() == "true",
    r"[-+]?(?:0|[1-9][0-9]{0,17})": int,
    r"[-+]?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?": WrittenNumber,
}
"""Scalars of YAML 1.2 that are no texts. A leading zero makes a text, as in CSV."""


class Document(NamedTuple):
    """A file that was read; ``values`` are its further columns. Bytes are checked to be UTF-8 later.

    An empty title stands for the name of the file, an empty encoding for one that is no guess.
    """

    title: str
    text: str | bytes
    values: Mapping[str, Any] = {}
    encoding: str = ""


class DocumentFormat(Format):
    """A format whose files are a document each."""

    is_typed = False
    is_document = True
    kinds = (MARKUP, TEXT)

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
        other = other_kind(raw, file.suffix, self.kinds)
        is_read = other is None and len(raw) <= config.max_document_bytes
        read = self.document(file, raw) if is_read else Document("", raw)
        own = {"id": file.doc_id(config), "title": read.title or PurePosixPath(file.relative).stem}
        batch = batch_of([{**read.values, **own, "text": read.text}], types, role_names(config))
        if other is not None:
            refused = pa.array([f"{Reason.DAMAGED_DOCUMENT} {other}"])
            batch = batch.set_column(batch.num_columns - 1, FAULT, refused)
        yield batch.replace_schema_metadata({ENCODING: read.encoding} if read.encoding else None)


class TextFormat(DocumentFormat):
    """Reads plain text as it is."""

    suffixes = (".txt",)
    unit = "line"

    @override
    def document(self, file: SourceFile, raw: bytes) -> Document:
        text, encoding = _utf8(raw)
        return Document("", text, encoding=encoding)


class MarkdownFormat(DocumentFormat):
    """Reads Markdown with its front matter."""

    suffixes = (".md", ".markdown")

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns of every document and those of its front matter, which is all that is read."""
        with file.open_stream() as stream:
            front = read_front_matter(_utf8(stream.read(FRONT_MATTER_BYTES))[0])
        fields = [
            _field(key, value) for key, value in front.values.items() if key not in DOCUMENT_SCHEMA.names
        ]
        return Footer(schema=pa.schema([*DOCUMENT_SCHEMA, *fields]), num_rows=1, fault=front.fault)

    @override
    def document(self, file: SourceFile, raw: bytes) -> Document:
        raw, encoding = _utf8(raw)
        front = read_front_matter(raw)
        text = raw[front.text_start :].lstrip(b"\r\n") if front.text_start else raw
        named = front.values.get("title")
        is_title = isinstance(named, str | int | float) and not isinstance(named, bool)
        title = str(named).strip() if is_title else ""
        text = without_pictures(text)
        title = title or heading(text[:TITLE_BYTES].decode("utf-8", "replace"))
        return Document(title, text, front.values, encoding)


def _field(key: str, value: Any) -> pa.Field:
    own, decimals = type_of(value), Decimals()
    decimals.add_value(key, value)
    return pa.field(key, own, metadata=OBJECTS if own == OBJECT else decimals.of(key))


def without_pictures(text: bytes) -> bytes:
    """Leave out of a text what addresses with `data:` encode."""
    return _DATA_URI.sub(rb"\1", text)


def _utf8(raw: bytes) -> tuple[bytes, str]:
    """Return a text in UTF-8, without a mark of its encoding, and that encoding where it is a guess."""
    encoding, is_guess = encoding_of(raw)
    if encoding == "utf-8-sig":
        return raw.removeprefix(codecs.BOM_UTF8), ""
    text, told = guessed_text(raw, encoding, is_guess)
    return text.encode(), told


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").disable("inline")  # blocks alone


@cache
def _inline_parser() -> MarkdownIt:
    return MarkdownIt("commonmark")


def heading(text: str) -> str:
    """Return the first heading that has a text, without marks and addresses, empty where there is none."""
    shown, tokens = "", _parser().parse(text)
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            (line,) = _inline_parser().parseInline(tokens[place + 1].content[:TITLE_CHARACTERS])
            shown = "".join(each.content or " " * (not each.nesting) for each in line.children or ())
        elif token.type == "html_block" and (found := _HTML_HEADING.search(token.content)):
            shown = unescape(re.sub("<[^>]*>", " ", found[1]))
        if title := " ".join(HEADING_ID.sub("", shown).split()):
            return title
    return ""


class FrontMatter(NamedTuple):
    """The keys of a file's front matter, where its text begins, and why a block could not be read."""

    values: Mapping[str, Any]
    text_start: int
    fault: str | None = None


def read_front_matter(raw: bytes) -> FrontMatter:
    """Read the front matter at the start of a file.

    A key that is a name of Cairn's own, such as `id` or `text`, gets the prefix `front_matter_`, and so does
    a title that is no text. A value that is neither a scalar nor a list of scalars is an empty dictionary.
    Where the block cannot be read, ``fault`` says why, and the text is the whole file.
    """
    head = raw[:FRONT_MATTER_BYTES]
    if head[:1] == b"{":
        return _read_json(head)
    found = _BLOCK.match(head)
    if found is None:
        return FrontMatter({}, 0)
    try:
        keyed = _toml(found["toml"]) if found["yaml"] is None else _yaml(found["yaml"])
    except UnicodeDecodeError:
        return FrontMatter({}, 0)  # the row is refused
    except RecursionError:
        return FrontMatter({}, 0, "it is nested too deeply")
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        return FrontMatter({}, 0, _fault(error))
    return FrontMatter({}, 0) if keyed is None else _checked(keyed, found.end())


def _checked(keyed: Mapping[str, Any], text_start: int) -> FrontMatter:
    for key in keyed:
        if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isprintable() and is_utf8(key)):
            fault = f"a key must be printable text of at most {MAX_KEY_CHARACTERS} characters"
            return FrontMatter({}, 0, fault)
    names = _OWN_NAMES | ({"title"} if isinstance(keyed.get("title"), dict | list) else set())
    values = {f"front_matter_{key}" if key in names else key: value for key, value in keyed.items()}
    return FrontMatter(values, text_start)


def _read_json(head: bytes) -> FrontMatter:
    """Read an object that ends with its line; what is none is text."""
    try:
        text = head.decode("utf-8", "ignore")
        found, end = json.JSONDecoder(parse_float=WrittenNumber).raw_decode(text)
    except (ValueError, RecursionError):
        return FrontMatter({}, 0)
    if text[end : end + 1] not in ("\n", "\r") or not found:
        return FrontMatter({}, 0)
    if told := _twice(text[:end]):
        return FrontMatter({}, 0, told)
    return _checked(_flat(found), len(text[:end].encode()))


def _twice(text: str) -> str | None:
    """Say which key stands twice in an object of JSON, and in which line."""
    met: list[set[str]] = []
    for found in _JSON_KEY.finditer(text):
        if found[0] == "{":
            met.append(set())
        elif found[0] == "}":
            met.pop()
        elif found[2]:
            key = json.loads(found[1])
            if key in met[-1]:
                return f"line {text.count(chr(10), 0, found.start()) + 1}: key {key[:100]!r} stands twice"
            met[-1].add(key)
    return None


def _toml(raw: bytes) -> Mapping[str, Any]:
    return _flat(tomllib.loads(raw.decode().replace("\r\n", "\n"), parse_float=WrittenNumber))


def _flat(keyed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return scalars and lists of them as they are, dates as texts, and all else as an empty dictionary."""

    def scalar(value: Any) -> Any:
        return value if value is None or isinstance(value, str | bool | int | float) else str(value)

    def kept(value: Any) -> Any:
        if not isinstance(value, list):
            return {} if isinstance(value, dict) else scalar(value)
        elements = cast("list[Any]", value)
        return {} if any(isinstance(each, list | dict) for each in elements) else [*map(scalar, elements)]

    return {key: kept(value) for key, value in keyed.items()}


def _yaml(raw: bytes) -> Mapping[str, Any] | None:
    """Return the keys of a block, None of one that is no mapping."""
    node = yaml.compose(raw.decode(), Loader=_WithoutAliases)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        return None
    met = set[str]()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in met:
            raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
        met.add(key.value if isinstance(key, yaml.ScalarNode) else "")
    return {key.value if isinstance(key, yaml.ScalarNode) else "": _value(value) for key, value in node.value}


class _WithoutAliases(yaml.BaseLoader):
    """Takes an alias for an empty mapping."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if not self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        self.get_event()
        return yaml.MappingNode("", [])


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    elements: list[Any] = node.value if isinstance(node, yaml.SequenceNode) else [None]
    are_scalars = all(isinstance(each, yaml.ScalarNode) for each in elements)
    return [*map(_scalar, elements)] if are_scalars else {}


def _scalar(node: yaml.ScalarNode) -> str | bool | int | float | None:
    if node.style is None:  # without quotes
        for pattern, made in _SCALARS.items():
            if re.fullmatch(pattern, node.value):
                return made(node.value)
    return node.value


def _fault(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        # The first line of the file is the one of three hyphens.
        has_colon = (error.problem or "").startswith("mapping values are not allowed")
        advice = "; put a value with a colon into quotes" if has_colon else ""
        return f"line {error.problem_mark.line + 2}: {error.problem}{advice}"
    return str(error).splitlines()[0]
