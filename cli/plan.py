"""`cairn plan NAME`: has the corpus drifted from its context, and what would a new one cost.

`--apply` gives it one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from cairn.cli.cluster import engine_options, open_engine, resolve_engine
from cairn.cli.options import given
from cairn.cli.settings import collection_argument, json_option
from cairn.cli.status import drift_line
from cairn.cli.terminal import ProgressBars, duration, echo, facts, table, thousands
from cairn.pipeline.config import TOKEN_BYTES
from cairn.pipeline.counted import counted
from cairn.pipeline.line.ingest_settings import resolve_ingest_config


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
) -> None:
    """Show how far the corpus of collection NAME has drifted from the context its vectors stand in.

    With --apply, safe to run every week: nothing is done until the drift is large, searches go on, and a
    killed run goes on when it is given again. With --apply --late, a collection without token vectors gets
    them, once.
    """
    from cairn.pipeline.collection import open_collection
    from cairn.pipeline.line.compatibility import stored_settings
    from cairn.pipeline.line.recontextualise import recontextualise

    engine = resolve_engine(given(ctx))
    status = open_collection(collection, root=root, verify=False).status()
    is_due = status["encoder"]["use_context"] and status["context"]["drift"]["verdict"] == "re-contextualise"
    report = None
    wants_tokens = late and status["token_vectors"] is None
    if is_applied and (wants_tokens or is_due or (force and status["encoder"]["use_context"])):
        wanted = {"encoder": {"token_bytes": TOKEN_BYTES}} if wants_tokens else {}
        config = resolve_ingest_config(wanted, stored_settings(root, collection))
        with ProgressBars(quiet=quiet) as progress:
            report = recontextualise(root, collection, config, progress, open_engine(engine, config))
    if as_json:
        planned = {name: status[name] for name in ("collection", "generation", "documents", "context")}
        applied = asdict(report) if report else None
        echo(json.dumps(planned | {"is_due": is_due, "applied": applied}))
    else:
        echo(facts(asdict(report)) if report else _planned(status, is_due=is_due, is_applied=is_applied))


def _planned(status: dict[str, Any], *, is_due: bool, is_applied: bool) -> str:
    context, now = status["context"], status["cluster_sizes"]
    drift, cost = context["drift"], context["recontextualisation"]
    shares = [
        f"cluster {each}: {counted(context['cluster_sizes'][each], 'document')} then, "
        f"{thousands(now[each])} now"
        for each in drift["changed_clusters"]
    ]
    if not status["encoder"]["use_context"]:
        advice = "none: the encoder reads no context, and no vector depends on it"
    elif is_due:
        advice = "--apply draws a new context and encodes every document"
    else:
        advice = f"none: the drift is {drift['verdict']}" + (
            "; --apply --force does it anyway" if is_applied else ""
        )
    rows = [
        ("collection", f"{status['collection']}, generation {status['generation']}"),
        ("drift", drift_line(drift)),
        *(("changed" if not number else "", share) for number, share in enumerate(shares)),
        (
            "to encode" if is_due else "would encode",
            f"{thousands(cost['documents'])} of {counted(status['documents'], 'document')}",
        ),
        ("", f"{counted(cost['tokens'], 'token')}, about {duration(cost['seconds'])}"),
        ("to do", advice),
    ]
    return table(rows)
