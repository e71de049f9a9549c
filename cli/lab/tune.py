"""`cairn tune NAME`: settings of a collection, chosen by what they measure on a share of its own corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from cairn.cli.lab.evaluation_tables import compared_cells
from cairn.cli.options import COUNT, SEED, NamedPath, Numbers
from cairn.cli.settings import collection_argument, json_option
from cairn.cli.terminal import ProgressBars, size, table, thousands

if TYPE_CHECKING:
    from cairn.pipeline.index.generation import Generation
    from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
    from cairn.pipeline.lab.tuning.funnel import FunnelReport
    from cairn.pipeline.lab.tuning.temperature import TemperatureReport


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option(
    "--temperature",
    "of_temperature",
    is_flag=True,
    help="Choose the attention temperature of documents and of queries (TempScale).",
)
@click.option(
    "--try",
    "temperatures",
    multiple=True,
    type=float,
    help="With --temperature: one to try; repeat.  [default: 0.8, 0.9 and 0.95]",
)
@click.option(
    "--judged",
    type=NamedPath(path_type=Path),
    help="Folder with queries and qrels.  [default: known items]",
)
@click.option("--queries", "max_queries", type=COUNT, default=300, help="Queries to draw, at most.")
@click.option(
    "--max-documents", type=COUNT, default=1_000, help="Documents to draw, at most, judged ones first."
)
@click.option("--dims", type=Numbers(), help="First dimensions of a funnel.  [default: 1/8, 1/4 and 1/2]")
@click.option("--seed", type=SEED, default=0, help="Of everything drawn.")
@click.option(
    "--cache", type=NamedPath(path_type=Path), help="Keep what --temperature encodes in this folder."
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
def tune(
    *,
    collection: str,
    root: str,
    of_temperature: bool,
    temperatures: tuple[float, ...],
    judged: Path | None,
    max_queries: int,
    max_documents: int,
    dims: tuple[int, ...] | None,
    seed: int,
    cache: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Show what a funnel search of collection NAME would find and save; with --temperature, choose τ.

    A funnel answers with the first dimensions of all vectors and judges the best by all dimensions. The
    collection is read and not changed.
    """
    from cairn.pipeline.errors import ConfigError
    from cairn.pipeline.index.generation import open_latest_intact_generation
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.lab.evaluate.measures import require_measures
    from cairn.pipeline.lab.tuning.sample import draw_sample, small_sample_warning

    if temperatures and not of_temperature:
        raise ConfigError("--try must come with --temperature, got --try alone; add --temperature")
    if dims is not None and of_temperature:
        raise ConfigError("--dims must come without --temperature, got both; run `cairn tune` twice")
    if of_temperature:
        require_measures()
    layout = CollectionLayout.at(Path(root), collection)
    layout.require_exists()
    generation = open_latest_intact_generation(layout)
    drawn = draw_sample(
        generation,
        judged,
        name=collection,
        max_documents=max_documents,
        max_queries=max_queries,
        seed=seed,
    )
    warning = small_sample_warning(len(drawn.queries), generation.num_documents)
    if not of_temperature:
        report = _funnel(generation, drawn, dims or ())
        _warn(warning)
        click.echo(json.dumps(report.to_dict()) if as_json else "\n".join(_funnel_lines(report)))
        return 0
    with ProgressBars(quiet=quiet) as progress:
        chosen = _temperature(generation, drawn, temperatures, seed, cache, progress)
    _warn(warning)
    click.echo(json.dumps(chosen.to_dict()) if as_json else "\n".join(_temperature_lines(chosen)))
    return 0


def _warn(warning: str | None) -> None:
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)


def _funnel(generation: Generation, drawn: RetrievalSet, dims: Sequence[int]) -> FunnelReport:
    from cairn.pipeline.collection import load_query_encoder
    from cairn.pipeline.lab.tuning.funnel import MAX_QUERIES, measure_funnel

    encoder = load_query_encoder(generation)
    vectors_QV = encoder.encode_queries(drawn.queries[:MAX_QUERIES])
    kinds = {segment.record.indexes["chunks"]["kind"] for segment in generation.segments}
    return measure_funnel(
        generation.manifest.collection, ", ".join(sorted(kinds)), generation.chunks, vectors_QV, dims=dims
    )


def _temperature(
    generation: Generation,
    drawn: RetrievalSet,
    temperatures: Sequence[float],
    seed: int,
    cache: Path | None,
    progress: ProgressBars,
) -> TemperatureReport:
    from cairn.pipeline.config import ContextConfig, EncoderConfig
    from cairn.pipeline.lab.tuning.temperature import TRIED, tune_temperature

    settings = generation.manifest.settings
    return tune_temperature(
        drawn,
        EncoderConfig(**settings["encoder"]),
        temperatures=temperatures or TRIED,
        context_config=ContextConfig(**settings["context"]),
        seed=seed,
        cache=cache,
        progress=progress,
    )


def _funnel_lines(report: FunnelReport) -> Iterator[str]:
    yield (
        f"{report.collection}: {thousands(report.vectors)} chunk vectors of {report.dims} dimensions, "
        f"{thousands(report.queries)} queries, one thread"
    )
    rows = [
        (row.name, f"{row.recall:.3f}", f"{row.milliseconds:.2f} ms", size(row.more_bytes))
        for row in report.rows
    ]
    yield table([("search", "recall@50", "a query", "more bytes"), *rows])
    yield f"\nto do: {report.advice}"


def _temperature_lines(report: TemperatureReport) -> Iterator[str]:
    yield (
        f"{report.set_name}: {thousands(report.documents)} documents, {thousands(report.queries)} queries; "
        "nDCG@10 by vectors alone"
    )
    yield "\nτ of one side, by tokens of the relevant document or of the query"
    yield table(
        [
            ("side", "τ", "tokens", "queries", "before", "difference", "95 % interval", "p", ""),
            *(
                (
                    row.side,
                    f"{row.temperature:g}",
                    f"{row.tokens}-{'' if row.end is None else row.end - 1}",
                    row.comparison.num_queries,
                    f"{row.before:.4f}",
                    *compared_cells(row.comparison),
                    row.verdict,
                )
                for row in report.by_length
            ),
        ]
    )
    yield "\nboth sides, on the half of the queries that chooses"
    yield table(
        [
            ("documents", "queries", "nDCG@10"),
            *((f"{e.documents:g}", f"{e.queries:g}", f"{e.quality:.4f}") for e in report.tried),
        ]
    )
    yield from _choice(report)


def _choice(report: TemperatureReport) -> Iterator[str]:
    if report.test is None:
        yield "\nto do: nothing, because no temperature scores above the settings as they are"
        return
    difference, interval, p_value = compared_cells(report.test)
    yield (
        f"\nchosen: τ {report.best.documents:g} for documents, {report.best.queries:g} for queries; on the "
        f"{thousands(report.test.num_queries)} other queries {difference} nDCG@10 (95 % {interval}, "
        f"p {p_value}): {report.verdict}"
    )
    if report.flags:
        yield f"to do: a collection of its own, `ingest … --collection NEW {report.flags}`"
    else:
        yield "to do: nothing. Keep the settings as they are"
