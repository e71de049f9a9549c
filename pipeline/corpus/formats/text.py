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

import datetime as dt
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from html import unescape
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import yaml
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import (
    FAULT,
    PLAIN_INTEGER,
    Learned,
    WrittenNumber,
    batch_of,
    role_names,
)
from cairn.pipeline.corpus.formats.encodings import text_of
from cairn.pipeline.corpus.formats.file_kind import MARKUP, TEXT, other_kind
from cairn.pipeline.corpus.formats.format import (
    ENCODING,
    HEADING_ID,
    Footer,
    Format,
    SourceFile,
    is_utf8,
)
from cairn.pipeline.corpus.quarantine import Reason
from cairn.pipeline.types import RESERVED_COLUMNS, TwiceError, once
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typing_extensions import override

DOCUMENT_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.string()), pa.field("title", pa.string()), pa.field("text", pa.large_string())]
)
TITLE_CHARACTERS_READ: Final = 64 << 10
"""How much of the start of a text is searched for its title."""
TITLE_CHARACTERS: Final = 1_000
FRONT_MATTER_CHARACTERS: Final = 64 << 10
"""How long a block may be; a longer one is text."""
_FRONT_MATTER_BYTES: Final = 4 * FRONT_MATTER_CHARACTERS + 4
"""What so many characters and a mark take, at most. The schema and the document look at these alone."""
MAX_KEY_CHARACTERS: Final = 256
_BLOCK: Final = re.compile(
    r"(?:---[ \t]*\r?\n(?P<yaml>.*?)^(?:---|\.\.\.)|\+\+\+[ \t]*\r?\n(?P<toml>.*?)^\+\+\+)"
    r"[ \t]*(?:\r?\n|\Z)",
    re.DOTALL | re.MULTILINE,
)
_DATA_URI: Final = re.compile(
    r"""(data:[\w.+/-]+;base64,)(?:[A-Za-z0-9+/=%]{64,}|[A-Za-z0-9+/=%]+(?=[)"'>]))"""
)
_HTML_HEADING: Final = re.compile(r"<h1\b[^>]{0,200}>(.{1,1000}?)</h1>", re.IGNORECASE | re.DOTALL)
_OWN_NAMES: Final = (RESERVED_COLUMNS - {"title"}) | {"id"}
_TEXT_TAG: Final = "tag:yaml.org,2002:str"
_SCALARS: Final[Mapping[str, Callable[[str], Any]]] = {
    r"~|null|Null|NULL|": lambda _: None,
    r"true|True|TRUE|false|False|FALSE": lambda written: written.lower() == "true",
    rf"[-+]?(?:{PLAIN_INTEGER})": int,
    r"[-+]?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?": WrittenNumber,
}
"""Scalars of YAML 1.2 that are no texts. A leading zero makes a text, as in CSV."""


class TextDocument(NamedTuple):
    """A file that was read; ``values`` are its further columns.

    An empty title stands for the name of the file, an empty encoding for one that is no guess.
    """

    title: str
    text: str
    values: Mapping[str, Any] = {}
    encoding: str = ""

    def rows(
        self,
        file: SourceFile,
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
        faults: Sequence[str | None],
    ) -> pa.RecordBatch:
        """Return the row of the document, which the first fault refuses, and one of each other fault."""
        own = {"id": file.doc_id(config), "text": self.text}
        own["title"] = self.title or PurePosixPath(file.relative).stem
        rows = [{**self.values, **own}, *({"id": own["id"]} for _ in faults[1:])]
        batch = batch_of(rows, types, role_names(config))
        told = [one or other for one, other in zip(faults, batch.column(FAULT).to_pylist(), strict=True)]
        batch = batch.set_column(batch.num_columns - 1, FAULT, pa.array(told, pa.string()))
        return batch.replace_schema_metadata({ENCODING: self.encoding} if self.encoding else None)


class DocumentFormat(Format):
    """A format whose files are a document each."""

    is_typed = False
    is_document = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns that every document has; the file is not opened."""
        return Footer(schema=DOCUMENT_SCHEMA, num_rows=1)


class TextFormat(DocumentFormat):
    """Reads plain text as it is; a format of other texts says what document their bytes make."""

    suffixes = (".txt", ".rst", ".adoc", ".asciidoc", ".org", ".tex")
    kinds = (MARKUP, TEXT)
    unit = "line"

    def document(self, file: SourceFile, raw: bytes) -> TextDocument:  # noqa: ARG002 (of code, its name)
        """Make a document of the bytes of a file."""
        text, encoding = text_of(raw)
        return TextDocument("", text, encoding=encoding)

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch]:
        """Yield the one document; of a file that is too large, only so much that the row checks refuse it."""
        with file.open() as stream:
            raw = stream.read(config.max_document_bytes + 1)
        other = other_kind(raw, file.suffix, self.kinds)
        is_read = other is None and len(raw) <= config.max_document_bytes
        read = self.document(file, raw) if is_read else TextDocument("", "?" * len(raw))
        yield read.rows(file, types, config, [other and f"{Reason.DAMAGED_DOCUMENT} {other}"])


class MarkdownFormat(TextFormat):
    """Reads Markdown with its front matter."""

    suffixes = (".md", ".markdown")
    unit = None

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns of every document and those of its front matter, which is all that is read."""
        with file.open_stream() as stream:
            front = read_front_matter(text_of(stream.read(_FRONT_MATTER_BYTES))[0])
        learned = Learned()
        for key, value in front.values.items():
            if key not in DOCUMENT_SCHEMA.names:
                learned.add_value(key, value)
        schema = pa.schema([*DOCUMENT_SCHEMA, *learned.schema()])
        return Footer(schema=schema, num_rows=1, fault=front.fault)

    @override
    def document(self, file: SourceFile, raw: bytes) -> TextDocument:
        text, encoding = text_of(raw)
        head = text if len(raw) <= _FRONT_MATTER_BYTES else text_of(raw[:_FRONT_MATTER_BYTES])[0]
        front = read_front_matter(head)
        if not text.startswith(head[: front.text_start]):  # the rest of the file is of another encoding
            front = FrontMatter({}, 0)
        text = text[front.text_start :].lstrip("\r\n") if front.text_start else text
        named = front.values.get("title")
        is_title = isinstance(named, str | int | float) and not isinstance(named, bool)
        title = str(named).strip() if is_title else ""
        text = without_pictures(text)
        # A block that cannot be read looks like a heading.
        title = title or heading(text[front.block_end : front.block_end + TITLE_CHARACTERS_READ])
        return TextDocument(title, text, front.values, encoding)


def without_pictures(text: str) -> str:
    """Leave out of a text what addresses with `data:` encode."""
    return _DATA_URI.sub(r"\1", text)


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").disable("inline")  # blocks alone


def heading(text: str) -> str:
    """Return the first heading that has a text, without marks and addresses, empty where there is none."""
    shown, tokens = "", _parser().parse(text)
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            line, parts = tokens[place + 1].content[:TITLE_CHARACTERS], list[Token]()
            _parser().inline.parse(line, _parser(), {}, parts)
            shown = "".join(
                each.content if each.content and each.type != "html_inline" else " " * (not each.nesting)
                for each in parts
            )
        elif token.type == "html_block" and (found := _HTML_HEADING.search(token.content)):
            shown = unescape(re.sub("<[^>]*>", " ", found[1]))
        if title := " ".join(HEADING_ID.sub("", shown).split()):
            return title
    return ""


class FrontMatter(NamedTuple):
    """The keys of a file's front matter, where its text begins, why a block cannot be read, and its end."""

    values: Mapping[str, Any]
    text_start: int
    fault: str | None = None
    block_end: int = 0


def read_front_matter(text: str) -> FrontMatter:
    """Read the front matter at the start of a file.

    A key that is a name of Cairn's own, such as `id` or `text`, gets the prefix `front_matter_`, and so does
    a title that is no text. A value that is neither a scalar nor a list of scalars is an empty dictionary.
    Where the block cannot be read, ``fault`` says why, and the text is the whole file.
    """
    head = text[:FRONT_MATTER_CHARACTERS]
    found = _BLOCK.match(head)
    end = found.end() if found else 0
    try:
        if head[:1] == "{":
            keyed, end = _json(head)
        elif found is None:
            return FrontMatter({}, 0)
        else:
            keyed = _yaml(found["yaml"]) if found["toml"] is None else _toml(found["toml"])
    except RecursionError:
        return FrontMatter({}, 0, "it is nested too deeply", end)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, TwiceError) as error:
        return FrontMatter({}, 0, _fault(error), end)
    return FrontMatter({}, 0) if keyed is None else _checked(keyed, end)


def _checked(keyed: Mapping[str, Any], text_start: int) -> FrontMatter:
    for key in keyed:
        if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isprintable() and is_utf8(key)):
            fault = f"a key must be printable text of at most {MAX_KEY_CHARACTERS} characters"
            return FrontMatter({}, 0, fault, text_start)
    names = _OWN_NAMES | ({"title"} if isinstance(keyed.get("title"), dict | list) else set())
    values = {f"front_matter_{key}" if key in names else key: value for key, value in keyed.items()}
    return FrontMatter(values, text_start)


def _json(head: str) -> tuple[Mapping[str, Any] | None, int]:
    """Return the keys of an object that ends with its line, and where; none of what is text."""
    try:
        found, end = json.JSONDecoder(parse_float=WrittenNumber).raw_decode(head)
    except (ValueError, RecursionError):
        return None, 0
    if head[end : end + 1] not in ("\n", "\r") or not found:
        return None, 0
    json.loads(head[:end], object_pairs_hook=once)
    return _flat(found), end


def _toml(block: str) -> Mapping[str, Any]:
    return _flat(tomllib.loads(block.replace("\r\n", "\n"), parse_float=WrittenNumber))


def _flat(keyed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return scalars and lists of them as they are, dates as texts, and all else as an empty dictionary."""

    def scalar(value: Any) -> Any:
        if isinstance(value, dt.datetime):  # str() has a blank for the T, and an offset for the Z
            return value.isoformat().replace("+00:00", "Z")
        return value if value is None or isinstance(value, str | bool | int | float) else str(value)

    def kept(value: Any) -> Any:
        if not isinstance(value, list):
            return {} if isinstance(value, dict) else scalar(value)
        elements = cast("list[Any]", value)
        return {} if any(isinstance(each, list | dict) for each in elements) else [*map(scalar, elements)]

    return {key: kept(value) for key, value in keyed.items()}


def _yaml(block: str) -> Mapping[str, Any] | None:
    """Return the keys of a block, None of one that is no mapping."""
    node = yaml.compose(block, Loader=_WithoutAliases)
    if node is None:  # of a block of comments, one may be a heading between two rules
        return None if block.strip() else {}
    if not isinstance(node, yaml.MappingNode):
        return None
    met = set[str]()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in met:
            raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
        met.add(key.value if isinstance(key, yaml.ScalarNode) else "")
    return {key.value if isinstance(key, yaml.ScalarNode) else "": _value(value) for key, value in node.value}


class _WithoutAliases(yaml.BaseLoader):
    """Takes an alias for an empty mapping, and what has the tag `!!str` for a text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if not self.check_event(yaml.AliasEvent):
            event, node = self.peek_event(), super().compose_node(parent, index)
            if isinstance(node, yaml.ScalarNode) and event.tag == _TEXT_TAG:  # as if it stood in quotes
                node.style = '"'
            return node
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
