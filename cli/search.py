"""`cairn search QUERY --collection NAME`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Final, cast

import click
from cairn.cli.options import add_options, chosen, filter_option
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import echo, printable, warn
from cairn.pipeline.search_options import OpenOptions, PublicSearchKeywords, SearchOptions
from cairn.pipeline.types import Passage, SearchResult

_WIDTH = 95
_EXCERPT_LINES = 5
"""Of a passage; one within a budget of characters is shown whole."""
_BEGIN, _END = "\ue0fe", "\ue0ff"
"""Stand around a word in bold while lines are broken: characters of no script."""
_BOLD: Final = re.compile(f"{_BEGIN}(.*?){_END}")
_TERMINAL_DEFAULTS: Final[dict[str, Any]] = {"top_k": 5, "passages": 2}
"""A screen holds fewer documents and passages than the answers to a program."""


@click.command(context_settings={"show_default": True})
@click.argument("query")
@click.option(
    "--collection", required=True, envvar="CAIRN_COLLECTION", help="Name of the collection to search."
)
@root_option
@add_options(SearchOptions, but=("filters", "weights"), defaults=_TERMINAL_DEFAULTS)
@click.option(
    "--rerank",
    metavar="MODEL",
    help="Cross-encoder that reranks the best passages, a name or folder; extra rerank.",
)
@filter_option("Keep")
@add_options(OpenOptions)
@json_option
@click.pass_context
def search(
    ctx: click.Context,
    query: str,
    *,
    collection: str,
    root: str,
    rerank: str | None,
    filters: tuple[str, ...],
    verify: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Answer QUERY with documents and their best passages."""
    from cairn.pipeline.collection import open_collection

    opened = open_collection(collection, root=root, verify=verify)
    options = {**_TERMINAL_DEFAULTS, **chosen(ctx, SearchOptions)}
    options["filters"] = opened.parse_filters(filters) if filters else None
    result = opened.search(query, rerank=rerank, **cast("PublicSearchKeywords", options))
    for warning in (*opened.warnings, *result.warnings):
        warn(warning)
    if as_json:
        echo(json.dumps(result.to_dict(), ensure_ascii=False))
    else:
        num_lines = _EXCERPT_LINES if options.get("max_characters") is None else None
        shown = printable("\n".join(_lines(result, num_lines)))
        click.echo(_BOLD.sub(lambda word: click.style(word[1], bold=True), shown))


def _found_by(passage: Passage, title: str) -> Iterator[str]:
    """Name the words of passage and title that answered the query, strongest first, with the query's own."""
    found = [
        *((each, passage.text, passage.start_char, []) for each in passage.highlights),
        *((each, title, 0, ["title"]) for each in passage.title_highlights),
    ]
    seen: set[str] = set()
    for each, text, start_char, place in sorted(found, key=lambda one: -one[0].weight):
        word = text[each.start_char - start_char : each.end_char - start_char]
        others = ", ".join(asked for asked in each.query_words if asked.casefold() != word.casefold())
        if word.casefold() not in seen:
            seen.add(word.casefold())
            notes = "; ".join([others, *place] if others else place)
            yield f"{word} ({notes})" if notes else word


def _excerpt(passage: Passage, num_lines: int | None) -> list[str]:
    """Return the lines of a passage with the most words that answered the query, these in bold."""
    marked, done = "", passage.start_char
    for each in passage.highlights:
        start, end = each.start_char - passage.start_char, each.end_char - passage.start_char
        marked += f"{passage.text[done - passage.start_char : start]}{_BEGIN}{passage.text[start:end]}{_END}"
        done = each.end_char
    marked += passage.text[done - passage.start_char :]
    lines = list(_broken(marked))
    num_shown = len(lines) if num_lines is None else min(num_lines, len(lines))
    firsts = range(len(lines) - num_shown + 1)
    first = max(firsts, key=lambda line: "".join(lines[line : line + num_shown]).count(_BEGIN))
    shown = lines[first : first + num_shown]
    if first:
        shown[0] = f"… {shown[0]}"
    if first + num_shown < len(lines):
        shown[-1] += " …"
    return shown


def _broken(text: str) -> Iterator[str]:
    """Yield the lines of a text with their indentation, without empty ones, long lines broken."""
    for line in textwrap.dedent(text.expandtabs(4)).splitlines():
        indent = line[: len(line) - len(line.lstrip())][: _WIDTH // 2]
        yield from textwrap.wrap(
            " ".join(line.split()), _WIDTH, initial_indent=indent, subsequent_indent=indent
        )


def _lines(result: SearchResult, num_lines: int | None) -> Iterator[str]:
    if not result.hits:
        yield "no passage fits" if result.warnings else "no document matches"
    for rank, hit in enumerate(result.hits, start=1):
        parts = "  ".join(f"{name} {value:.3f}" for name, value in hit.scores.items())
        title, doc_id = (" ".join(name.split()) for name in (hit.title or hit.doc_id, hit.doc_id))
        yield f"{rank}. {title}   [{doc_id}]   score {hit.score:.4f}  ({parts})"
        for passage in hit.passages:
            page = f"  {passage.page}" if passage.page else ""
            yield f"   {passage.start_char}-{passage.end_char}{page}  {passage.score:.3f}"
            yield from (f"     {line}" for line in _excerpt(passage, num_lines))
            if words := ", ".join(_found_by(passage, hit.title or "")):
                yield f"     found by: {words}"
        yield ""
