"""Front matter: a YAML mapping between two lines of `---` at the start of a Markdown file.

Its keys are read as YAML 1.2 names scalars: a date stays the text that it is, `yes` is a text, too. Nothing
but scalars and lists of them is built, so no tag, alias or merge key can make a small file large. A block
that is no mapping, such as a text between two rules, is no front matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import yaml
from cairn.pipeline.corpus.listing import is_utf8
from cairn.pipeline.types import RESERVED_COLUMNS

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
