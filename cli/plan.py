"""`cairn plan NAME`: has the corpus drifted from its context, and what would a new one cost.

`--apply` gives it one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.cluster import engine_options, open_engine, resolve_engine
from cairn.cli.options import given
from cairn.cli.settings import collection_argument, json_option
from cairn.cli.terminal import ProgressBars, duration, echo, table, thousands
from cairn.pipeline.config import TOKEN_BYTES
from cairn.pipeline.line.ingest_settings import resolve_ingest_config

if TYPE_CHECKING:
    from cairn.pipeline.line.recontextualise import RecontextualisationPlan, RecontextualisationReport


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option(
    "--apply",
    "is_applied",
    is_flag=True,
    help="Where the drift asks for it, draw a new context and encode every document.",
)
@click.option("--force", is_flag=True, help="With --apply: do it whatever the drift is.")
@click.option(
    "--late",
    is_flag=True,
    help="With --apply: give token vectors to a collection without; encodes every document.",
)
@engine_options
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    collection: str,
    root: str,
    *,
    is_applied: bool,
    force: bool,
    late: bool,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Show how far the corpus of collection NAME has drifted from the context its vectors stand in.

    With --apply, safe to run every week: nothing is done until the drift is large, searches go on, and a
    killed run goes on when it is given again. With --apply --late, a collection without token vectors gets
    them, once.
    """
    from cairn.pipeline.line.compatibility import stored_settings
    from cairn.pipeline.line.recontextualise import plan_recontextualisation, recontextualise

    engine = resolve_engine(given(ctx))
    planned = plan_recontextualisation(root, collection)
    report = None
    wants_tokens = late and not planned.has_token_vectors
    if is_applied and (wants_tokens or (planned.reads_context and (planned.is_due or force))):
        wanted = {"encoder": {"token_bytes": TOKEN_BYTES}} if wants_tokens else {}
        config = resolve_ingest_config(wanted, stored_settings(root, collection))
        with ProgressBars(quiet=quiet) as progress:
            report = recontextualise(root, collection, config, progress, open_engine(engine, config))
    if as_json:
        echo(json.dumps(asdict(planned) | {"applied": asdict(report) if report else None}))
    else:
        echo(table(_applied(report) if report else _planned(planned, is_applied=is_applied)))
    return 0


def _planned(planned: RecontextualisationPlan, *, is_applied: bool) -> list[tuple[str, str]]:
    shares = [
        f"cluster {each.cluster}: {thousands(each.documents_at_context)} documents then, "
        f"{thousands(each.documents)} now"
        for each in planned.changed_clusters
    ]
    if not planned.reads_context:
        advice = "none: the encoder reads no context, and no vector depends on it"
    elif planned.is_due:
        advice = "--apply draws a new context and encodes every document"
    else:
        advice = f"none: the drift is {planned.verdict}" + (
            "; --apply --force does it anyway" if is_applied else ""
        )
    return [
        ("collection", f"{planned.collection}, generation {planned.generation}"),
        (
            "drift",
            (
                f"{planned.verdict}  (total variation {planned.total_variation:.3f}, "
                f"{planned.added_share:.1%} of documents added since)"
            ),
        ),
        *(("changed" if not number else "", share) for number, share in enumerate(shares)),
        (
            "to encode" if planned.is_due else "would encode",
            f"{thousands(planned.encode_documents)} of {thousands(planned.documents)} documents",
        ),
        ("", f"{thousands(planned.encode_tokens)} tokens, about {duration(planned.encode_seconds)}"),
        ("to do", advice),
    ]


def _applied(report: RecontextualisationReport) -> list[tuple[str, str]]:
    return [
        ("generation", str(report.generation)),
        ("documents", f"{thousands(report.documents)}  ({thousands(report.encoded)} encoded in this run)"),
        ("clusters", thousands(report.clusters)),
        ("context", f"{thousands(report.context_documents)} documents"),
        ("time", duration(report.seconds)),
        *((f"  {stage}", duration(seconds)) for stage, seconds in report.stage_seconds.items()),
    ]
