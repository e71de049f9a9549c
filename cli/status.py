"""`cairn status NAME`: what a collection holds, how it was built, how far it drifted; `cairn list`: all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
from cairn.cli.options import add_options
from cairn.cli.settings import collection_argument, json_option, root_option
from cairn.cli.terminal import duration, echo, size, table, thousands
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.counted import counted
from cairn.pipeline.index.names import resolve_root
from cairn.pipeline.model.folders.names import is_endpoint
from cairn.pipeline.search_options import OpenOptions

_SHOWN = frozenset({"model", "pooling", "attention", "landmark_interval", "use_context", "batch_tokens"}) | {
    "sparse_model",
    "describe",
    "describe_model",
}


@click.command(context_settings={"show_default": True})
@collection_argument
@add_options(OpenOptions)
@json_option
def status(*, collection: str, root: str, verify: bool, as_json: bool) -> None:
    """Describe collection NAME: what it holds, how it was built, how far it drifted."""
    from cairn.pipeline.collection import open_collection

    report = open_collection(collection, root=root, verify=verify).status()
    echo(json.dumps(report, default=str) if as_json else _describe(report))


@click.command(name="list")
@root_option
@json_option
def list_collections(*, root: str, as_json: bool) -> None:
    """List the collections under the root: documents, chunks, generation."""
    from cairn.pipeline.collection import list_statuses

    listed = list_statuses(root)
    heading = ("collection", "documents", "chunks", "generation")
    rows = [
        tuple(each[name] for name in heading)
        if each["generation"]
        else (each["collection"], each["status"], "", "")
        for each in listed
    ]
    say = table([heading, *rows]) if rows else f"no collections under {resolve_root(root)}"
    echo(json.dumps(listed) if as_json else say)


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


def _segments(report: dict[str, Any]) -> str:
    """Say how many there are, how much of them is deleted, and what merging them would do."""
    segments, merge, num_partitions = report["segments"], report["merge"], len(report["partitions"])
    deleted = sum(segment["deleted_documents"] for segment in segments)
    stored = deleted + sum(segment["documents"] for segment in segments)
    told = f"{len(segments)}" if num_partitions == 1 else f"{len(segments)} in {num_partitions} partitions"
    if len(segments) == num_partitions and not deleted:
        return told
    share = f", {deleted / stored:.1%} of their documents deleted" if deleted else ""
    due = "" if num_partitions > 1 else "; no merge is due"
    if merge is not None:
        due = f"; the next change merges the newest {merge['segments']}, {counted(merge['chunks'], 'chunk')}"
    of_what = "all" if num_partitions == 1 else "each partition"
    left_out = ", without the deleted" if deleted else ""
    return f"{told}{share}{due}  (cairn compact makes one of {of_what}{left_out})"


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


def _encoder(encoder: dict[str, Any]) -> str:
    model, interval = encoder["model"], encoder["landmark_interval"]
    if encoder["given_dims"]:
        return f"{counted(encoder['given_dims'], 'number')} that documents bring; queries by {model}"
    if is_endpoint(model):
        return f"{model}: a vector for each chunk of at most {interval} tokens"
    return (
        f"{model}: {encoder['pooling']} pooling, {encoder['attention']} attention, a landmark every "
        f"{interval} tokens"
    )


def _token_vectors(report: dict[str, Any]) -> str:
    found, encoder = report["token_vectors"], report["encoder"]
    if found is not None:
        return f"{counted(found['vector_bytes'], 'byte')} a token, {size(found['bytes'])}"
    if encoder["given_dims"] or is_endpoint(encoder["model"]):
        return "none"
    return f"none: searches go without; `cairn plan {report['collection']} --apply --late` makes them"


def _describer(encoder: dict[str, Any]) -> str:
    model = encoder["describe_model"] or "the language model"
    return f"each chunk is read, and its words are counted, behind a line by {model} at {encoder['describe']}"


def drift_line(drift: dict[str, Any]) -> str:
    """Say how far a corpus has moved from its context."""
    return (
        f"{drift['verdict']}  (total variation {drift['total_variation']:.3f}, "
        f"{drift['added_share']:.1%} of documents added since)"
    )


def _describe(report: dict[str, Any]) -> str:
    encoder, context, drift = report["encoder"], report["context"], report["context"]["drift"]
    cost, sparse = context["recontextualisation"], report["sparse"]
    use_of_context = "read by the encoder" if encoder["use_context"] else "not read by the encoder"
    rows = [
        ("collection", report["collection"]),
        ("generation", f"{report['generation']}  ({report['created_at']})"),
        ("documents", thousands(report["documents"])),
        ("chunks", thousands(report["chunks"])),
        ("tokens", thousands(report["tokens"])),
        ("on disk", size(report["disk_bytes"])),
        ("segments", _segments(report)),
        ("document index", _index(report, "documents")),
        ("chunk index", _index(report, "chunks")),
        ("encoder", _encoder(encoder)),
        *([("", chosen)] if (chosen := _beyond_the_defaults(encoder)) else []),
        *([("", report["encoder_note"])] if report["encoder_note"] else []),
        *([("described", _describer(encoder))] if encoder.get("describe") else []),
        ("token vectors", _token_vectors(report)),
        *([("sparse weights", f"{sparse['model']}, {size(sparse['bytes'])}")] if sparse else []),
        ("clusters", _clusters(report["cluster_sizes"])),
        ("context", f"{counted(context['documents'], 'document')}, {use_of_context}"),
        ("drift", drift_line(drift)),
        (
            "",
            (
                f"re-contextualising (cairn plan) would encode {counted(cost['documents'], 'document')}, "
                f"about {duration(cost['seconds'])}"
                if encoder["use_context"]
                else "no vector depends on the context"
            ),
        ),
        *(("warning", warning) for warning in report["warnings"]),
    ]
    return table(rows)
