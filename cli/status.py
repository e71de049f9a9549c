"""`cairn status NAME`: what a collection holds, how it was built, how far it drifted; `cairn list`: all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from cairn.cli.options import COUNT, add_options
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import duration, size, table, thousands
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.counted import counted
from cairn.pipeline.index.roots import resolve_root
from cairn.pipeline.search_options import OpenOptions
from click.core import ParameterSource

_SHOWN = frozenset({"model", "pooling", "attention", "landmark_interval", "use_context", "batch_tokens"})


@click.command(context_settings={"show_default": True})
@click.argument("collection", required=False, metavar="[NAME]")
@root_option
@click.option(
    "--route-clusters",
    type=COUNT,
    help="Measure searches that ask only the shards of so many clusters, as `cairn serve` does with it.",
)
@click.option("--shards", type=COUNT, default=ClusterSettings().shards, help="For --route-clusters.")
@add_options(OpenOptions)
@json_option
@click.pass_context
def status(
    ctx: click.Context,
    *,
    collection: str | None,
    root: str,
    route_clusters: int | None,
    shards: int,
    verify: bool,
    as_json: bool,
) -> int:
    """Describe collection NAME, or list all collections, as `cairn list` does."""
    from cairn.pipeline.collection import open_collection

    if collection is None:
        for name in ("route_clusters", "shards", "verify"):
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} must come with the NAME of a collection")
        click.echo(_listed(root, as_json=as_json))
        return 0
    opened = open_collection(collection, root=root, verify=verify)
    report = opened.status()
    if route_clusters is not None:
        recall = opened.route_recall(shards, route_clusters)
        report["routing"] = {"route_clusters": route_clusters, "shards": shards, **asdict(recall)}
    click.echo(json.dumps(report, default=str) if as_json else _describe(report))
    return 0


@click.command(name="list")
@root_option
@json_option
def list_collections(*, root: str, as_json: bool) -> int:
    """List the collections under the root: documents, chunks, generation."""
    click.echo(_listed(root, as_json=as_json))
    return 0


def _listed(root: str, *, as_json: bool) -> str:
    from cairn.pipeline.collection import list_statuses

    listed = list_statuses(root)
    if as_json:
        return json.dumps(listed)
    heading = ("collection", "documents", "chunks", "generation")
    rows = [
        tuple(each[name] for name in heading)
        if each["generation"]
        else (each["collection"], each["status"], "", "")
        for each in listed
    ]
    return table([heading, *rows]) if rows else f"no collections under {resolve_root(root)}"


def _use_of_context(encoder: dict[str, Any]) -> str:
    """Say what the context does: an older collection has no ``whitening``."""
    uses = [
        use
        for use, is_made in (
            ("read by the encoder", encoder["use_context"]),
            ("whitens its vectors", encoder.get("whitening")),
        )
        if is_made
    ]
    return " and ".join(uses) or "not read by the encoder"


def _clusters(sizes: Sequence[int]) -> str:
    filled = sum(size > 0 for size in sizes)
    empty = len(sizes) - filled
    return thousands(filled) + (f"  ({thousands(empty)} more without a document)" if empty else "")


def _beyond_the_defaults(encoder: dict[str, Any]) -> str:
    """Write the encoder settings that differ from the defaults and have no row of their own."""
    defaults = IngestConfig().to_dict()["encoder"]
    chosen = {
        name: value for name, value in encoder.items() if name not in _SHOWN and value != defaults.get(name)
    }
    return ", ".join(
        f"{name.replace('_', ' ')} {json.dumps(value, ensure_ascii=False)}" for name, value in chosen.items()
    )


def _segments(segments: list[dict[str, Any]], merge: dict[str, int] | None) -> str:
    """Say how many there are, how much of them is deleted, and what merging them would do."""
    deleted = sum(segment["deleted_documents"] for segment in segments)
    stored = deleted + sum(segment["documents"] for segment in segments)
    if len(segments) == 1 and not deleted:
        return "1"
    share = f", {deleted / stored:.1%} of their documents deleted" if deleted else ""
    due = "no merge is due"
    if merge is not None:
        due = f"the next change merges the newest {merge['segments']}, {thousands(merge['chunks'])} chunks"
    left_out = ", without the deleted" if deleted else ""
    return f"{len(segments)}{share}; {due}  (cairn compact makes one of all{left_out})"


def _index(report: dict[str, Any], table: str) -> str:
    """Say why an index is of its kind or, where segments have several, how many vectors each kind holds."""
    segments = report["segments"]
    if len(segments) == 1:
        return report["indexes"][table]["why"]
    held = Counter[str]()
    for segment in segments:
        held[segment["kinds"][table]] += segment[table]
    kinds = ", ".join(f"{thousands(count)} in {kind}" for kind, count in held.most_common())
    return f"{thousands(held.total())} vectors: {kinds}"


def _routing(measured: dict[str, Any]) -> str:
    return (
        f"{measured['route_clusters']} clusters: recall@10 {measured['recall_at_10']:.3f} of "
        f"{measured['queries']} sampled queries, {measured['asked_share']:.0%} of {measured['shards']} "
        "shards asked"
    )


def _token_vectors(found: dict[str, int] | None, collection: str) -> str:
    if found is None:
        command = f"cairn plan {collection} --apply --late"
        return f"none: searches go without; `{command}` makes them where the model can"
    return f"{found['dims']} dimensions of {found['bits']} bits, {size(found['bytes'])}"


def _describe(report: dict[str, Any]) -> str:
    encoder, context, drift = report["encoder"], report["context"], report["context"]["drift"]
    cost = context["recontextualisation"]
    rows = [
        ("collection", report["collection"]),
        ("generation", f"{report['generation']}  ({report['created_at']})"),
        ("documents", thousands(report["documents"])),
        ("chunks", thousands(report["chunks"])),
        ("tokens", thousands(report["tokens"])),
        ("on disk", size(report["disk_bytes"])),
        ("segments", _segments(report["segments"], report["merge"])),
        ("document index", _index(report, "documents")),
        ("chunk index", _index(report, "chunks")),
        (
            "encoder",
            (
                f"{encoder['model']}: {encoder['pooling']} pooling, {encoder['attention']} attention, "
                f"a landmark every {encoder['landmark_interval']} tokens"
            ),
        ),
        *([("", chosen)] if (chosen := _beyond_the_defaults(encoder)) else []),
        *([("", report["encoder_note"])] if report["encoder_note"] else []),
        ("token vectors", _token_vectors(report["token_vectors"], report["collection"])),
        ("clusters", _clusters(report["cluster_sizes"])),
        *([("routing", _routing(report["routing"]))] if "routing" in report else []),
        (
            "context",
            (f"{counted(context['documents'], 'document')}, {_use_of_context(encoder)}"),
        ),
        (
            "drift",
            (
                f"{drift['verdict']}  (total variation {drift['total_variation']:.3f}, "
                f"{drift['added_share']:.1%} of documents added since)"
            ),
        ),
        (
            "",
            (
                f"re-contextualising (cairn plan) would encode {counted(cost['documents'], 'document')}, "
                f"about {duration(cost['seconds'])}"
                if EncoderConfig(**encoder).needs_context
                else "no vector depends on the context"
            ),
        ),
        *(("warning", warning) for warning in report["warnings"]),
    ]
    return table(rows)
