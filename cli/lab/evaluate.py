"""`cairn evaluate FOLDER…`: the table of systems on judged corpora, and which configuration to use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.lab.evaluation_tables import (
    advice_lines,
    compared_cells,
    context_table,
    measure_table,
    set_lines,
)
from cairn.cli.options import COUNT, SEED, NamedPath, add_options, chosen
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, table, thousands
from cairn.pipeline.config import DEFAULT_MODEL, ContextConfig, EncoderConfig
from cairn.pipeline.counted import counted

if TYPE_CHECKING:
    from cairn.pipeline.lab.evaluate.bench import SystemResult
    from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
    from cairn.pipeline.lab.evaluate.systems import System


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, required=True, type=NamedPath(path_type=Path), metavar="FOLDER...")
@click.option(
    "--ablate",
    is_flag=True,
    help="The whole table: every encoder, with no, random and corpus context, ranked in every way.",
)
@click.option(
    "--ablate-context",
    is_flag=True,
    help="Only compare contexts: none, random, tied, of several sizes and lengths.",
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
@add_options(EncoderConfig, ContextConfig)
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
    "--compare",
    nargs=2,
    type=NamedPath(path_type=Path),
    metavar="RUN RUN",
    help="Only compare two TREC run files on one set.",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def evaluate(
    ctx: click.Context,
    folders: tuple[Path, ...],
    *,
    ablate: bool,
    ablate_context: bool,
    patterns: tuple[str, ...],
    against: str | None,
    baseline_model: str | None,
    known_items: int | None,
    max_queries: int | None,
    max_documents: int | None,
    seed: int,
    runs: Path | None,
    cache: Path | None,
    compare: tuple[Path, Path] | None,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Score systems on judged corpora: FOLDERs with the files corpus, queries and qrels.

    Without --ablate the baselines stand beside what an ingest with these settings gives. With --known-items a
    FOLDER is what `ingest` reads.
    """
    from cairn.pipeline.lab.evaluate.known_items import known_item_set
    from cairn.pipeline.lab.evaluate.measures import require_measures
    from cairn.pipeline.lab.evaluate.retrieval_set import (
        read_retrieval_set,
        require_distinct_names,
        sample_set,
    )
    from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config

    whole = [
        known_item_set(folder, known_items, seed) if known_items else read_retrieval_set(folder)
        for folder in folders
    ]
    sets = [
        sample_set(judged, max_queries=max_queries, max_documents=max_documents, seed=seed)
        for judged in whole
    ]
    require_distinct_names(sets)
    if compare:
        return _compare_runs(sets, compare, seed, as_json=as_json)
    require_measures()
    model = chosen(ctx, EncoderConfig).get("model", DEFAULT_MODEL)
    context = context_config(model, {**chosen(ctx, ContextConfig), "seed": seed})
    if ablate_context:
        encoder = encoder_config(chosen(ctx, EncoderConfig))
        return _ablate_context(sets, encoder, context, quiet=quiet, as_json=as_json)
    systems = _systems(chosen(ctx, EncoderConfig), context, baseline_model, patterns, ablate=ablate)
    _require_known(against, systems)
    if not (quiet or as_json):
        _say_estimate(sets, systems)
    with ProgressBars(quiet=quiet) as progress:
        results = list(_score(sets, systems, context, runs, cache, progress))
    _show(sets, results, against, seed, as_json=as_json)
    return 0


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
    from cairn.pipeline.model.folders.model_defaults import encoder_config
    from cairn.pipeline.model.untrained_settings import window_warning

    base = encoder_config(settings)
    window = None if ablate else window_warning(base)  # the whole table has windows, too
    if window is not None:
        click.echo(f"warning: {window}", err=True)
    selection = choose_systems(
        base, baseline_config(settings, baseline_model), context, patterns, is_whole_table=ablate
    )
    reasons = selection.left_out
    for reason in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, own in reasons.items() if own == reason)
        click.echo(f"left out: {names}: {reason}", err=True)
    return selection.systems


def _say_estimate(sets: Sequence[RetrievalSet], systems: Sequence[System]) -> None:
    from cairn.pipeline.lab.evaluate.bench import estimate_seconds

    estimate = estimate_seconds(sets, systems)
    if estimate is None:
        return
    click.echo(
        f"about {duration(estimate.seconds)} of encoding: {counted(len(systems), 'row')}, "
        f"{counted(estimate.encodings, 'encoding')} of {thousands(estimate.tokens)} tokens; ranking, and a "
        "context where the model reads one, come on top; --max-documents makes it shorter",
        err=True,
    )


def _require_known(against: str | None, systems: Sequence[System]) -> None:
    from cairn.pipeline.errors import ConfigError

    names = [system.name for system in systems]
    if against is not None and against not in names:
        raise ConfigError(f"--against must name one of {', '.join(names)}, got {against!r}")


def _score(
    sets: Sequence[RetrievalSet],
    systems: Sequence[System],
    context: ContextConfig,
    runs: Path | None,
    cache: Path | None,
    progress: ProgressBars,
) -> Iterator[SystemResult]:
    from dataclasses import replace

    from cairn.pipeline.lab.evaluate.bench import run_bench
    from cairn.pipeline.lab.evaluate.measures import write_run

    for judged in sets:
        for result in run_bench(judged, systems, context, progress, cache):
            if runs is not None:
                tag = result.system.name.replace("/", "-")
                write_run(runs / judged.name.replace(" ", "-") / f"{tag}.trec", judged, result.run, tag)
            yield replace(result, run=())  # written or not wanted: a table holds too many to keep


def _compare_runs(sets: Sequence[RetrievalSet], paths: tuple[Path, Path], seed: int, *, as_json: bool) -> int:
    from dataclasses import asdict

    from cairn.pipeline.errors import ConfigError
    from cairn.pipeline.lab.evaluate.measures import measure_run, read_run
    from cairn.pipeline.lab.evaluate.significance import compare_paired

    if len(sets) != 1:
        raise ConfigError(f"--compare must have the one folder both runs were made on, got {len(sets)}")
    first, second = (measure_run(sets[0], read_run(path)) for path in paths)
    compared = {name: compare_paired(first[name], second[name], seed=seed) for name in first}
    if as_json:
        click.echo(json.dumps({name: asdict(comparison) for name, comparison in compared.items()}))
        return 0
    rows = [
        (name, f"{first[name].mean():.4f}", f"{second[name].mean():.4f}", *compared_cells(comparison))
        for name, comparison in compared.items()
    ]
    click.echo(table([("", *(path.name for path in paths), "difference", "95 % interval", "p"), *rows]))
    return 0


def _ablate_context(
    sets: Sequence[RetrievalSet],
    encoder: EncoderConfig,
    context: ContextConfig,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    from dataclasses import asdict

    from cairn.pipeline.lab.evaluate.context_ablation import ablate_context

    with ProgressBars(quiet=quiet) as progress:
        rows = {
            judged.name: ablate_context(judged, encoder, context, seed=context.seed, progress=progress)
            for judged in sets
        }
    if as_json:
        click.echo(json.dumps({name: [asdict(row) for row in own] for name, own in rows.items()}))
        return 0
    for name, own in rows.items():
        click.echo(f"\n{name}: nDCG@10 by vectors alone, and the difference from the context as served")
        click.echo(context_table(own))
    return 0


def _show(
    sets: Sequence[RetrievalSet],
    results: Sequence[SystemResult],
    against: str | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    from cairn.pipeline.lab.evaluate.bench import evidence_ceiling
    from cairn.pipeline.lab.evaluate.report import Report

    report = Report(results)
    reference = against or report.best_baseline()
    if as_json:
        described = {
            judged.name: {
                "documents": len(judged.doc_ids),
                "queries": len(judged.query_ids),
                "skipped": dict(judged.skipped),
                "ceiling": evidence_ceiling(judged),
            }
            for judged in sets
        }
        click.echo(json.dumps({"sets": described, "seed": seed, **report.to_dict(reference, seed)}))
        return
    for judged in sets:
        click.echo("\n".join(set_lines(judged, report, reference, seed, evidence_ceiling(judged))))
    if len(sets) > 1:
        click.echo(f"\naverage of {len(sets)} sets")
        click.echo(measure_table(report.averages(), {}))
    click.echo("\n".join(advice_lines(report, seed)))
