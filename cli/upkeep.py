"""Verbs that look after a collection: where documents came from, repairs, columns, deletions and others."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from cairn.cli.cluster import engine_options, resolve_engine
from cairn.cli.options import filter_option, given
from cairn.cli.settings import collection_argument, json_option, root_option
from cairn.cli.terminal import ProgressBars, echo, facts, table
from cairn.pipeline.counted import counted
from cairn.pipeline.errors import UsageError
from click.core import ParameterSource

_NOT_THERE = 2
"""Exit code where no document is of the id."""


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("doc_id")
@json_option
def lineage(*, collection: str, doc_id: str, root: str, as_json: bool) -> int:
    """Show which file, row and run document DOC_ID of collection NAME came from, and what encoded it."""
    from cairn.pipeline.collection import open_collection

    found = open_collection(collection, root=root).lineage(doc_id)
    if found is None:
        echo(f"not in the collection: {doc_id}", err=True)
        return _NOT_THERE
    told = found.to_dict()
    echo(json.dumps(told, ensure_ascii=False) if as_json else facts(told))
    return 0


@click.command(context_settings={"show_default": True})
@click.argument("name", required=False, metavar="[NAME")
@click.argument("to", required=False, metavar="TO]")
@root_option
@click.option("--back", is_flag=True, help="Let NAME answer from the collection before.")
@json_option
def switch(*, name: str | None, to: str | None, root: str, back: bool, as_json: bool) -> None:
    """Let searches of NAME be answered from collection TO; without arguments list the switched names.

    Servers follow within a request, and answer from the collection before until TO is open. Verbs that
    write, such as ingest, go on with the collection of that name.
    """
    from cairn.pipeline.index import aliases
    from cairn.pipeline.index.layout import CollectionLayout

    if name is None:
        found = aliases.read_aliases(root)
        rows = [("name", "answers from", "before")]
        rows += [(each, alias.to, alias.before) for each, alias in found.items()]
        said = table(rows) if found else f"no switched names under {root}"
        echo(json.dumps({each: asdict(alias) for each, alias in found.items()}) if as_json else said)
        return
    if (to is None) != back:
        raise click.UsageError("switch must have either TO or --back")
    alias = aliases.switch(root, name, to)
    had_one = alias.before != name or CollectionLayout.at(Path(root), name).exists()
    say = f"{name} answers from {alias.to}; before from {alias.before if had_one else 'none'}"
    echo(json.dumps({"name": name, **asdict(alias)}) if as_json else say)


@click.command(context_settings={"show_default": True})
@collection_argument
@json_option
def verify(*, collection: str, root: str, as_json: bool) -> int:
    """Check every stored file of collection NAME against its hashes; exit 1 when something is wrong."""
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.verify import verify_collection

    layout = CollectionLayout.at(Path(root), collection)
    problems = verify_collection(layout)
    if as_json:
        found = [asdict(problem) for problem in problems]
        echo(json.dumps({"collection": collection, "problems": found}, default=str))
        return 1 if problems else 0
    for problem in problems:
        where = "" if problem.generation is None else f"generation {problem.generation}, "
        echo(f"{where}{problem.file}: {problem.sentence}")
    if problems:
        echo(f"{len(problems)} problem(s); run `{layout.command('repair')}`", err=True)
        return 1
    echo(f"{collection}: every file matches its hash")
    return 0


@click.command(context_settings={"show_default": True})
@collection_argument
def repair(*, collection: str, root: str) -> None:
    """Rebuild damaged files of collection NAME from its tables, or return to its last intact generation."""
    from cairn.pipeline.index.layout import CollectionLayout, read_manifest
    from cairn.pipeline.index.recovery import repair_collection

    layout = CollectionLayout.at(Path(root), collection)
    with ProgressBars() as progress:
        outcome = repair_collection(layout, progress)
    if outcome.lost and not read_manifest(layout, outcome.generation).documents:
        echo(f"EVERY document of collection {collection!r} is lost")
    echo(outcome.action)
    for doc_id in outcome.lost:
        echo(f"lost: {doc_id}")
    if outcome.lost:
        again = layout.command("ingest", "SOURCE...", "--collection", collection, "--reread")
        echo(f"{len(outcome.lost)} document(s) were given up; run `{again}` to encode them again")


@click.command(context_settings={"show_default": True})
@collection_argument
@partial(engine_options, but=("worker_gpus", "shard_deadline"))
@click.pass_context
def compact(ctx: click.Context, *, collection: str, root: str, **_: Any) -> None:
    """Merge small files of collection NAME and drop what no kept generation needs.

    Workers of a Ray cluster write the index files of a large collection where they see its root.
    """
    from cairn.cli.cluster import open_engine
    from cairn.pipeline.config import IngestConfig
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import compact_collection

    layout = CollectionLayout.at(Path(root), collection)
    engine = open_engine(resolve_engine(given(ctx)), IngestConfig())
    with closing(engine) if engine else nullcontext(), ProgressBars() as bars:
        manifest = compact_collection(layout, bars, engine.run_tasks if engine else None)
    documents = counted(manifest.documents, "document")
    echo(f"{collection}: generation {manifest.generation} holds {documents}, compacted")


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("columns", nargs=-1, required=True, metavar="COLUMN=TYPE...")
def retype(*, collection: str, columns: tuple[str, ...], root: str) -> None:
    """Give metadata columns of collection NAME other types, such as year=int64; nothing is encoded again.

    Types are string, int64, double, bool, date32[day], timestamp[us], others of Arrow, and list[TYPE]. Where
    a value does not fit without loss, it is named and nothing changes.
    """
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import retype_columns

    parts = [each.rpartition("=") for each in columns]
    wrong = next((each for each, (name, _, _) in zip(columns, parts, strict=True) if not name), None)
    if wrong is not None:
        raise click.UsageError(f"a column must come as COLUMN=TYPE, got {wrong!r}")
    types = {name: text for name, _, text in parts}
    with ProgressBars() as progress:
        manifest = retype_columns(CollectionLayout.at(Path(root), collection), types, progress)
    echo(f"{collection}: generation {manifest.generation} holds {', '.join(columns)}")


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("partitions", type=click.IntRange(min=1))
def repartition(*, collection: str, partitions: int, root: str) -> None:
    """Cut collection NAME into so many PARTITIONS; rows are copied, nothing is encoded again.

    Searches go on meanwhile, and are answered from the new partitions once all of them stand.
    """
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import repartition as cut

    with ProgressBars() as progress:
        manifest = cut(CollectionLayout.at(Path(root), collection), partitions, progress)
    echo(
        f"{collection}: generation {manifest.generation} holds {counted(manifest.documents, 'document')} in "
        f"{counted(len(manifest.partitions) or 1, 'partition')}"
    )


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("doc_ids", nargs=-1, metavar="[DOC_ID...]")
@filter_option("Delete")
@click.option("--dry-run", is_flag=True, help="List the ids that would be deleted; change nothing.")
def delete(
    *, collection: str, doc_ids: tuple[str, ...], filters: tuple[str, ...], dry_run: bool, root: str
) -> int:
    """Delete documents of collection NAME by id, or those that match every --filter.

    Unknown ids are listed, and exit 2 says that none was known.
    """
    from cairn.pipeline.collection import Collection
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import delete_documents

    if bool(doc_ids) == bool(filters):
        raise click.UsageError(
            f"delete must have ids or --filter, got {'both' if filters else 'neither'}; "
            f"{'leave one of them out' if filters else 'name documents, or say which'}"
        )
    layout = CollectionLayout.at(Path(root), collection)
    layout.require_exists()
    wanted, found = list(dict.fromkeys(doc_ids)), Collection(layout)
    if filters:
        wanted = found.documents.ids(found.parse_filters(filters))
    if dry_run:
        known = set(wanted if filters else found.documents.ids())
        present, missing = ([each for each in wanted if (each in known) is here] for here in (True, False))
        echo("\n".join([*present, f"{collection}: {len(present):,} would be deleted"]))
        num_deleted = len(present)
    else:
        with ProgressBars() as progress:
            report = delete_documents(layout, wanted, progress)
        echo(f"{collection}: {report.deleted:,} deleted, generation {report.generation}")
        num_deleted, missing = report.deleted, report.missing
    if missing:
        echo(f"not in the collection: {', '.join(missing)}", err=True)
    return 0 if num_deleted or filters else _NOT_THERE


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.pass_context
def drop(ctx: click.Context, *, collection: str, root: str, yes: bool) -> None:
    """Delete collection NAME with everything that is stored of it; its name must be typed, or --yes given.

    A collection that is being written is refused. Sources are not touched.
    """
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import drop_collection, require_droppable
    from cairn.pipeline.serve.uploads import Uploads

    if ctx.get_parameter_source("collection") is not ParameterSource.COMMANDLINE:
        raise click.UsageError("drop must have the NAME of a collection, got none; cairn.toml does not count")
    layout = CollectionLayout.at(Path(root), collection)
    require_droppable(layout)
    if not yes:
        try:
            typed = click.prompt(f"type {collection} to delete it", err=True)
        except click.Abort:
            typed = ""
        if typed != collection:
            raise UsageError(
                f"{collection} must be typed to delete it, got {typed[:80]!r}; nothing was deleted, --yes "
                "deletes without asking"
            )
    drop_collection(layout)
    Uploads(layout.root).forget(collection)
    echo(f"{collection}: deleted")
