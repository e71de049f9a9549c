"""`cairn evaluate FOLDER…`: the table of systems on judged corpora, and which configuration to use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.options import COUNT, SEED, NamedPath, add_options, chosen
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, echo, size, table, thousands, warn
from cairn.pipeline.config import DEFAULT_MODEL, ContextConfig, EncoderConfig
from cairn.pipeline.counted import counted

if TYPE_CHECKING:
    from cairn.pipeline.lab.evaluate.bench import Cost, SystemResult
    from cairn.pipeline.lab.evaluate.measures import PairedComparison
    from cairn.pipeline.lab.evaluate.report import Report
    from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
    from cairn.pipeline.lab.evaluate.systems import System


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, type=NamedPath(path_type=Path), metavar="FOLDER...")
@click.option(
    "--ablate",
    is_flag=True,
    help="The whole table: every encoder, with no, random and corpus context, ranked in every way.",
)
@click.option(
    "--systems",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Only systems whose name matches, such as 'mean/*'; repeat.",
)
@click.option("--against", help="Compare every system with this one.  [default: the best baseline]")
@click.option(
    "--baseline-model",
    help="Encoder of the baselines.  [default: what --model was trained on, else as --model]",
)
@add_options(EncoderConfig, ContextConfig, but=("sparse_model",))
@click.option(
    "--vector-column",
    metavar="NAME",
    help="Column of corpus and queries with vectors of their own, which are ranked in place of encoded ones.",
)
@click.option(
    "--known-items",
    type=COUNT,
    help="For a corpus without queries: so many first sentences find their texts.",
)
@click.option(
    "--max-queries",
    type=COUNT,
    help="Draw at most so many queries of each set.  [default: all]",
)
@click.option(
    "--max-documents",
    type=COUNT,
    help="Draw at most so many documents, judged ones first.  [default: all]",
)
@click.option("--seed", type=SEED, default=0, help="Of everything drawn: samples, contexts, tests.")
@click.option(
    "--runs", type=NamedPath(path_type=Path), help="Write a TREC run file of every system under this folder."
)
@click.option(
    "--cache",
    type=NamedPath(path_type=Path),
    help="Keep encoded sets in this folder; a killed run goes on with them.",
)
@click.option(
    "--public",
    is_flag=True,
    help="Print the commands that score these settings on BEIR and LongEmbed through MTEB, and exit.",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def evaluate(
    ctx: click.Context,
    folders: tuple[Path, ...],
    *,
    ablate: bool,
    patterns: tuple[str, ...],
    against: str | None,
    baseline_model: str | None,
    vector_column: str | None,
    known_items: int | None,
    max_queries: int | None,
    max_documents: int | None,
    seed: int,
    runs: Path | None,
    cache: Path | None,
    public: bool,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Score systems on judged corpora: FOLDERs with the files corpus, queries and qrels.

    Without --ablate the baselines stand beside what an ingest with these settings gives. With --known-items a
    FOLDER is what `ingest` reads.
    """
    from cairn.pipeline.errors import ConfigError
    from cairn.pipeline.lab.evaluate.measures import require_measures
    from cairn.pipeline.lab.evaluate.retrieval_set import (
        given_width,
        known_item_set,
        read_retrieval_set,
        require_distinct_names,
        sample_set,
    )
    from cairn.pipeline.lab.evaluate.systems import given_systems, select_systems
    from cairn.pipeline.model.folders.model_defaults import context_config

    if public:
        from cairn.pipeline.lab.evaluate.public import public_lines

        echo("\n".join(public_lines(chosen(ctx, EncoderConfig))))
        return
    if not folders:
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
    if vector_column is not None and (ablate or baseline_model or known_items):
        raise ConfigError(
            "--vector-column must go without --ablate, --baseline-model and --known-items, which encode "
            "texts; leave them out"
        )
    sets: list[RetrievalSet] = []
    for folder in folders:
        if known_items:
            whole = known_item_set(folder, known_items, seed)
        else:
            whole = read_retrieval_set(folder, vector_column)
        sets.append(sample_set(whole, max_queries=max_queries, max_documents=max_documents, seed=seed))
    require_distinct_names(sets)
    require_measures()
    settings = chosen(ctx, EncoderConfig)
    context = context_config(
        settings.get("model", DEFAULT_MODEL), {**chosen(ctx, ContextConfig), "seed": seed}
    )
    if vector_column is None:
        systems = _systems(settings, context, baseline_model, patterns, ablate=ablate)
    else:
        dims = given_width(sets)
        systems = select_systems(given_systems(settings, vector_column, dims), patterns)
    names = [system.name for system in systems]
    if against is not None and against not in names:
        raise ConfigError(f"--against must name one of {', '.join(names)}, got {against!r}")
    with ProgressBars(quiet=quiet) as progress:
        results = list(_score(sets, systems, context, runs, cache, progress))
    _show(sets, results, against, seed, as_json=as_json)


def _systems(
    settings: Mapping[str, Any],
    context: ContextConfig,
    baseline_model: str | None,
    patterns: Sequence[str],
    *,
    ablate: bool,
) -> Sequence[System]:
    """Choose the systems, and say which were left out."""
    from cairn.pipeline.lab.evaluate.systems import baseline_config, choose_systems
    from cairn.pipeline.model.folders.model_defaults import encoder_config, window_warning

    base = encoder_config(settings, for_ingest=True)
    window = None if ablate else window_warning(base)  # the whole table has windows, too
    if window is not None:
        warn(window)
    systems, reasons = choose_systems(
        base, baseline_config(settings, baseline_model), context, patterns, is_whole_table=ablate
    )
    for reason in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, own in reasons.items() if own == reason)
        echo(f"left out: {names}: {reason}", err=True)
    return systems


def _score(
    sets: Sequence[RetrievalSet],
    systems: Sequence[System],
    context: ContextConfig,
    runs: Path | None,
    cache: Path | None,
    progress: ProgressBars,
) -> Iterator[SystemResult]:
    from cairn.pipeline.lab.evaluate.bench import run_bench
    from cairn.pipeline.lab.evaluate.measures import write_run

    for judged in sets:
        for result in run_bench(judged, systems, context, progress, cache):
            if runs is not None:
                tag = result.system.name.replace("/", "-")
                write_run(runs / judged.name.replace(" ", "-") / f"{tag}.trec", judged, result.run, tag)
            yield replace(result, run=())  # written or not wanted: a table holds too many to keep


def _show(
    sets: Sequence[RetrievalSet],
    results: Sequence[SystemResult],
    against: str | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    from cairn.pipeline.lab.evaluate.report import Report

    report = Report(results)
    reference = against or report.best_baseline()
    if as_json:
        described = {
            judged.name: {
                "documents": len(judged.doc_ids),
                "queries": len(judged.query_ids),
                "skipped": dict(judged.skipped),
            }
            for judged in sets
        }
        echo(json.dumps({"sets": described, "seed": seed, **report.to_dict(reference, seed)}))
        return
    for judged in sets:
        echo("\n".join(_set_lines(judged, report, reference, seed)))
    if len(sets) > 1:
        echo(f"\naverage of {len(sets)} sets")
        echo(_measure_table(report.averages(), {}))
    echo("\n".join(advice_lines(report, seed)))


def _set_lines(judged: RetrievalSet, report: Report, reference: str | None, seed: int) -> Iterator[str]:
    """Yield the lines on one judged set: what it holds, measures of every system, differences."""
    yield (
        f"\n{judged.name}: {counted(len(judged.doc_ids), 'document')}, "
        f"{thousands(len(judged.query_ids))} queries"
    )
    for reason, count in judged.skipped.items():
        yield f"  left out: {thousands(count)} {reason}"
    own = {name: results[report.set_names.index(judged.name)] for name, results in report.by_system.items()}
    yield _measure_table(
        {name: result.means() for name, result in own.items()},
        {name: result.cost for name, result in own.items()},
    )
    others = [name for name, result in own.items() if name != reference and not result.system.is_baseline]
    if reference is not None and others:
        best = ", the best baseline" if reference == report.best_baseline() else ""
        yield f"\n{judged.name}: difference from {reference}{best}"
        yield table(_difference_rows(judged.name, report, others, reference, seed))


def _difference_rows(
    set_name: str, report: Report, names: Sequence[str], reference: str, seed: int
) -> Iterator[Sequence[str]]:
    from cairn.pipeline.lab.evaluate.bench import primary_measures

    measures = primary_measures(report.by_system[reference][report.set_names.index(set_name)].values)
    yield ("", *(cell for measure in measures for cell in (measure, "95 % interval", "p")))
    for name in names:
        compared = [dict(report.compare(name, reference, measure, seed))[set_name] for measure in measures]
        yield (name, *(cell for comparison in compared for cell in _compared_cells(comparison)))


def _compared_cells(comparison: PairedComparison) -> tuple[str, str, str]:
    """Return a difference, its interval and its p-value as cells."""
    return (
        f"{comparison.difference:+.4f}",
        f"{comparison.low:+.4f} to {comparison.high:+.4f}",
        f"{comparison.p_value:.4f}",
    )


def _measure_table(means: Mapping[str, Mapping[str, float]], costs: Mapping[str, Cost]) -> str:
    """Return the table of systems and their measures, with their costs where there are some."""
    names = list(dict.fromkeys(name for own in means.values() for name in own))
    rows: list[Sequence[str]] = [("", *names, *(("encode", "index", "query") if costs else ()))]
    for system, own in means.items():
        cells = [f"{own[name]:.4f}" if name in own else "" for name in names]
        if costs:
            cost = costs[system]
            cells += [duration(cost.encode_seconds), size(cost.index_bytes)]
            cells.append(f"{cost.query_milliseconds:.1f} ms")
        rows.append((system, *cells))
    return table(rows)


def advice_lines(report: Report, seed: int) -> Iterator[str]:
    """Yield which configuration to use, what it costs, and what is noise."""
    own = report.advise(seed)
    if own is None:
        return
    speed = own.tokens / own.encode_seconds if own.encode_seconds else 0.0
    yield f"\nuse: {own.system}   (quality {own.quality:.4f})"
    yield f"  ingest SOURCE --collection NAME {own.ingest_flags}".rstrip()
    if own.ingest_flags.startswith("--vector-column"):  # a text alone would be answered by words
        yield f"  search_vectors(VECTORS, queries=TEXTS), as with the flags {own.search_flags or '(none)'}"
    else:
        yield f"  cairn search QUERY --collection NAME {own.search_flags}".rstrip()
    yield (
        f"  costs {duration(own.encode_seconds)} to encode {thousands(own.tokens)} tokens "
        f"({thousands(speed)} a second), "
        f"{size(own.index_bytes)} of vectors and BM25, {own.query_milliseconds:.1f} ms to encode a query"
    )
    yield from _noise_lines(report, own.system, seed)
    best = report.best_baseline()
    if best is not None and report.quality(best) > own.quality:
        chance = "" if report.is_told_apart(best, own.system, seed) else ", which may be chance"
        yield f"\nthe baseline {best} is better here (quality {report.quality(best):.4f}){chance}"


def _noise_lines(report: Report, name: str, seed: int) -> Iterator[str]:
    alike = sorted(report.not_told_apart(name, seed).items(), key=lambda item: -item[1].difference)
    if not alike:
        return
    yield f"\nnoise: how these rows differ from {name} may be chance; judge more queries to tell"
    yield table(
        [("", "difference", "95 % interval", "p")]
        + [(other, *_compared_cells(each)) for other, each in alike]
    )
