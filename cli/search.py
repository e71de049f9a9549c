"""`cairn search QUERY --collection NAME`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

import click

from cli.settings import json_option, root_option
from pipeline.types import SearchResult

_WIDTH = 100


@click.command(context_settings={"show_default": True})
@click.argument("query")
@click.option(
    "--collection", required=True, envvar="CAIRN_COLLECTION", help="Name of the collection to search."
)
@root_option
@click.option("--top-k", type=int, default=5, help="Documents to answer with.")
@click.option(
    "--granularity",
    type=click.Choice(["both", "document", "chunk"]),
    default="both",
    help="Vectors to rank by.",
)
@click.option("--passages", type=int, default=2, help="Best passages to show of each document.")
@click.option(
    "--chunk-tokens",
    type=int,
    help="Length of a passage, a multiple of the landmark interval.  [default: 128]",
)
@click.option(
    "--max-characters",
    type=int,
    help="Instead: the best passages of all documents within so many characters.",
)
@click.option("--hybrid/--no-hybrid", default=True, help="Fuse the vectors' ranking with BM25.")
@click.option(
    "--rerank",
    metavar="MODEL",
    help="Cross-encoder that judges the best passages anew, a name or folder; extra rerank.",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Keep matching documents; =, !=, >, >=, <, <=; repeat.",
)
@json_option
def search(
    query: str,
    *,
    collection: str,
    root: str,
    top_k: int,
    granularity: str,
    passages: int,
    chunk_tokens: int | None,
    max_characters: int | None,
    hybrid: bool,
    rerank: str | None,
    filters: tuple[str, ...],
    as_json: bool,
) -> int:
    """Answer QUERY with documents and their best passages."""
    from pipeline.collection import open_collection

    opened = open_collection(collection, root=root)
    result = opened.search(
        query,
        top_k=top_k,
        granularity=granularity,
        passages=passages,
        chunk_tokens=chunk_tokens,
        max_characters=max_characters,
        hybrid=hybrid,
        rerank=rerank,
        filters=opened.parse_filters(filters) if filters else None,
    )
    for warning in opened.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(result.to_dict(), default=str, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(result, has_budget=max_characters is not None)))
    return 0


def _lines(result: SearchResult, *, has_budget: bool) -> Iterator[str]:
    if not result.hits:
        yield "nothing matches, or no passage fits so few characters" if has_budget else "no document matches"
    for rank, hit in enumerate(result.hits, start=1):
        parts = "  ".join(f"{name} {value:.3f}" for name, value in hit.scores.items())
        title, doc_id = (" ".join(name.split()) for name in (hit.title or hit.doc_id, hit.doc_id))
        yield f"{rank}. {title}   [{doc_id}]   score {hit.score:.4f}  ({parts})"
        for passage in hit.passages:
            yield f"   {passage.start_char}-{passage.end_char}  {passage.score:.3f}"
            text = " ".join(passage.text.split())
            yield from textwrap.wrap(
                text,
                width=_WIDTH,
                initial_indent="     ",
                subsequent_indent="     ",
                max_lines=4,
                placeholder=" …",
            )
        yield ""
