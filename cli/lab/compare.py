"""`cairn compare OLD NEW`: what would change if one collection took another's place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from cairn.cli.options import COUNT, SEED, NamedPath
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import ProgressBars, duration, echo, size, table, thousands, warn

if TYPE_CHECKING:
    from cairn.pipeline.lab.evaluate.shadow import ShadowReport

_SHOWN: Final = 5
_QUALITY: Final = {"helps": "better", "hurts": "worse", "noise": "noise"}
_SPEED: Final = {"helps": "slower", "hurts": "faster", "noise": "noise"}


@click.command(context_settings={"show_default": True})
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@root_option
@click.option(
    "--queries",
    type=NamedPath(path_type=Path, exists=True),
    help="File of queries, a server's feedback log, or a judged folder.",
)
@click.option("--known-items", type=COUNT, help="Ask by first sentences of so many documents of OLD.")
@click.option("--top-k", type=click.IntRange(1, 200), default=10, help="Documents of each answer.")
@click.option("--max-queries", type=COUNT, default=500, help="Draw at most so many queries.")
@click.option("--seed", type=SEED, default=0, help="Of everything drawn.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
def compare(
    *,
    old: str,
    new: str,
    root: str,
    queries: Path | None,
    known_items: int | None,
    top_k: int,
    max_queries: int,
    seed: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Ask collections OLD and NEW the same queries, and show what moves and what it costs.

    Nothing is switched: `cairn switch` does that. With judged or clicked documents the quality of both is
    compared, too.
    """
    if (queries is None) == (known_items is None):
        raise click.UsageError("compare must have either --queries or --known-items")
    from cairn.pipeline.collection import Collection
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.lab.evaluate.shadow import compare_collections, read_asked_queries
    from cairn.pipeline.lab.evaluate.shadow import known_items as first_sentences

    def opened(name: str) -> Collection:
        layout = CollectionLayout.at(Path(root), name)
        layout.require_exists()
        return Collection(layout)  # itself, whatever the name answers from

    before, after = opened(old), opened(new)
    asked = (
        first_sentences(before, known_items or 0, seed)
        if queries is None
        else read_asked_queries(queries).sample(max_queries, seed)
    )
    for warning in asked.warnings:
        warn(warning)
    with ProgressBars(quiet=quiet) as progress:
        report = compare_collections(before, after, asked, top_k=top_k, seed=seed, progress=progress)
    echo(json.dumps(asdict(report), ensure_ascii=False) if as_json else "\n".join(_lines(report)))


def _lines(report: ShadowReport) -> Iterator[str]:
    slower = report.milliseconds_comparison
    rows = [
        ("queries", f"{thousands(report.queries)}, the first {report.top_k} documents of each answer"),
        ("overlap", f"{report.overlap:.3f}  (95 %: {report.overlap_low:.3f} to {report.overlap_high:.3f})"),
        ("same first", f"{report.same_first:.1%} of queries"),
    ]
    quality = report.quality_comparison
    if report.quality is not None and quality is not None and report.quality_verdict is not None:
        said = (
            f"{report.quality['old']:.4f} to {report.quality['new']:.4f}, {thousands(report.judged_queries)}"
        )
        rows.append((f"nDCG@{report.top_k}", f"{said} queries: {_QUALITY[report.quality_verdict]}"))
        rows.append(("", f"{quality.low:+.4f} to {quality.high:+.4f}, p {quality.p_value:.4f}"))
    rows.append(("query time", _SPEED[report.milliseconds_verdict]))
    rows.append(("", f"{slower.low:+.1f} to {slower.high:+.1f} ms, p {slower.p_value:.4f}"))
    yield table(rows)
    sides = (report.old, report.new)
    yield ""
    yield table(
        [
            ("", *(f"{side.collection}, generation {side.generation}" for side in sides)),
            ("model", *(side.model for side in sides)),
            ("documents", *(thousands(side.documents) for side in sides)),
            ("chunks", *(thousands(side.chunks) for side in sides)),
            ("tokens encoded", *(thousands(side.tokens) for side in sides)),
            ("time to encode", *(duration(side.encode_seconds) for side in sides)),
            ("index files", *(size(side.index_bytes) for side in sides)),
            ("query, median", *(f"{side.query_milliseconds:.1f} ms" for side in sides)),
        ]
    )
    for each in report.changed[:_SHOWN]:
        yield f"\n{each.overlap:.2f}  {' '.join(each.query.split())}"
        yield f"      gone: {', '.join(each.gone[:_SHOWN]) or 'none'}"
        yield f"      came: {', '.join(each.came[:_SHOWN]) or 'none'}"
