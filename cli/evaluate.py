"""`cairn evaluate FOLDER…`: the table of systems on judged corpora, and which configuration to use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.flags import FIELD_OF
from cli.settings import TemperatureSteps, given, json_option, warn_of_window
from cli.terminal import ProgressBars, duration, size, table, thousands

if TYPE_CHECKING:
    from pipeline.config import ContextConfig, EncoderConfig
    from pipeline.evaluate.bench import Cost, SystemResult
    from pipeline.evaluate.length_collapse import LengthCollapse
    from pipeline.evaluate.report import Advice, Report
    from pipeline.evaluate.retrieval_set import RetrievalSet
    from pipeline.evaluate.significance import Comparison
    from pipeline.evaluate.systems import System
    from pipeline.model.engine.backbone import Backbone

_SAME_NAME = (
    *(
        "model",
        "pooling",
        "attention",
        "landmarks",
        "landmark_interval",
        "temperature",
        "query_temperature",
        "temperature_by_length",
    ),
    *(
        "whole_text_tokens",
        "causal",
        "query_prefix",
        "document_prefix",
        "pool_prefix",
        "use_context",
        "precision",
        "backend",
    ),
)
_ENCODER_FIELDS = {
    name: FIELD_OF.get(name, name) for name in (*_SAME_NAME, "dims", "layers", "window_tokens")
}
_SHARED_OPTIONS = ("precision", "backend")
_MODEL_OPTIONS = ("model", "dims", "layers", "causal", "query_prefix", "document_prefix", "pool_prefix")


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FOLDER...")
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
    "--model",
    envvar="CAIRN_MODEL",
    help="Encoder: a name, cached or embedded, or a folder.  [default: cairn-minilm]",
)
@click.option(
    "--baseline-model",
    help="Encoder of the baselines.  [default: what --model was trained on, else as --model]",
)
@click.option("--pooling", help="Of cairn/…, as for ingest.  [default: mean]")
@click.option(
    "--attention",
    type=click.Choice(["chunk", "full", "landmark"]),
    help="Of cairn/…, as for ingest.  [default: chunk]",
)
@click.option("--window-tokens", type=int, help="Of cairn/…, as for ingest.  [default: 512; landmark: 8192]")
@click.option(
    "--landmarks",
    type=click.Choice(["fixed", "sentence"]),
    help="Of our own systems, as for ingest.  [default: fixed]",
)
@click.option(
    "--landmark-interval", type=int, help="Tokens between two landmarks of our own systems.  [default: 64]"
)
@click.option(
    "--whole-text-tokens",
    type=int,
    help="Our texts of at most so many tokens are one chunk.  [default: as the model says]",
)
@click.option(
    "--temperature", type=float, help="Divide attention logits by this (TempScale).  [default: 1.0]"
)
@click.option("--query-temperature", type=float, help="The same for queries alone.  [default: as documents]")
@click.option(
    "--temperature-by-length",
    type=TemperatureSteps(),
    help="The same for rows of so many tokens on: 128:0.95,512:0.9.",
)
@click.option("--dims", type=int, help="Keep the first so many dimensions (Matryoshka).  [default: all]")
@click.option("--layers", type=int, help="Run the first so many layers (Matryoshka).  [default: all]")
@click.option(
    "--causal/--bidirectional", default=None, help="What tokens of a decoder see.  [default: bidirectional]"
)
@click.option("--query-prefix", help="Text before every query.  [default: none]")
@click.option("--document-prefix", help="Text before every row of a document.  [default: none]")
@click.option(
    "--pool-prefix/--no-pool-prefix",
    default=None,
    help="Take prefixes into the mean.  [default: as the model's folder says]",
)
@click.option(
    "--use-context/--no-context",
    default=None,
    help="Whether cairn/… reads the corpus's context.  [default: as the model says]",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    help="Arithmetic of the encoder.  [default: auto]",
)
@click.option(
    "--backend", type=click.Choice(["torch", "openvino"]), help="What runs the encoders.  [default: torch]"
)
@click.option("--context-documents", type=click.IntRange(min=1), default=512, help="Documents of a context.")
@click.option(
    "--known-items",
    type=click.IntRange(min=1),
    help="For a corpus without queries: so many first sentences find their texts.",
)
@click.option(
    "--max-queries",
    type=click.IntRange(min=1),
    help="Draw at most so many queries of each set.  [default: all]",
)
@click.option(
    "--max-documents",
    type=click.IntRange(min=1),
    help="Draw at most so many documents, judged ones first.  [default: all]",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Of everything drawn: samples, contexts, tests."
)
@click.option(
    "--runs", type=click.Path(path_type=Path), help="Write a TREC run file of every system under this folder."
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="Keep encoded sets in this folder; a killed run goes on with them.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="RUN RUN",
    help="Only compare two TREC run files on one set.",
)
@click.option(
    "--length-report",
    is_flag=True,
    help="Only measure whether longer texts get embeddings that are more alike.",
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
    context_documents: int,
    known_items: int | None,
    max_queries: int | None,
    max_documents: int | None,
    seed: int,
    runs: Path | None,
    cache: Path | None,
    compare: tuple[Path, Path] | None,
    length_report: bool,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Score systems on judged corpora: FOLDERs with corpus.parquet, queries.parquet and qrels.parquet.

    Without --ablate the baselines stand beside what an ingest with these settings gives. With --known-items a
    FOLDER needs only Parquet files with id and text.
    """
    from pipeline.config import ContextConfig
    from pipeline.evaluate.known_items import known_item_set
    from pipeline.evaluate.retrieval_set import read_retrieval_set, require_distinct_names, sample_set

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
    if length_report:
        return _report_lengths(sets, _base(given(ctx)), seed, quiet=quiet, as_json=as_json)
    systems = _systems(given(ctx), patterns, ablate=ablate)
    _require_known(against, systems)
    with ProgressBars(quiet=quiet) as progress:
        results = list(
            _score(
                sets,
                systems,
                ContextConfig(num_documents=context_documents, seed=seed),
                runs,
                cache,
                progress,
            )
        )
    _show(sets, results, against, seed, as_json=as_json)
    return 0


def _base(chosen: Mapping[str, Any]) -> EncoderConfig:
    """Return what an ingest with these options would encode with."""
    from pipeline.config import EncoderConfig
    from pipeline.model.folders.model_defaults import model_defaults

    own = {field: chosen[name] for name, field in _ENCODER_FIELDS.items() if name in chosen}
    return EncoderConfig(**{**model_defaults(own), **own})


def _baseline_base(chosen: Mapping[str, Any]) -> EncoderConfig:
    """Return the settings of the baselines: their model's own, with the options that are not about how Cairn chunks and pools.

    Where nobody names their model it is the one the evaluated model was trained on, else that model itself.
    """
    from pipeline.config import DEFAULT_MODEL
    from pipeline.model.folders.model_defaults import base_of_folder
    from pipeline.model.folders.names import model_folder

    base = base_of_folder(model_folder(chosen.get("model", DEFAULT_MODEL)))
    model = chosen.get("baseline_model", base.model if base else None)
    kept = _SHARED_OPTIONS if "baseline_model" in chosen else (*_SHARED_OPTIONS, *_MODEL_OPTIONS)
    options = {name: chosen[name] for name in kept if name in chosen}
    return _base({**options, **({"model": model} if model else {})})


def _systems(chosen: Mapping[str, Any], patterns: Sequence[str], *, ablate: bool) -> list[System]:
    from pipeline.encode.encoder_fit import require_fit
    from pipeline.evaluate.systems import baseline_systems, configured_systems, our_systems, select_systems
    from pipeline.model.backbone_loader import load_backbone

    base, baseline = _base(chosen), _baseline_base(chosen)
    if not ablate:  # the whole table has windows, too
        warn_of_window(chosen, base)
    backbones = {config.model: load_backbone(config) for config in (base, baseline)}
    ours = our_systems(base, max_positions=backbones[base.model].max_positions) if ablate else []
    ours = _servable(ours, backbones)
    known = {system.encoding for system in ours}
    require_fit(base, backbones[base.model])
    ours += [system for system in configured_systems(base) if system.encoding not in known]
    tokenizer = backbones[baseline.model].tokenizer
    prefix_tokens = max(
        len(tokenizer.encode(prefix, add_special_tokens=False).ids)
        for prefix in (baseline.query_prefix, baseline.document_prefix)
    )
    baselines = baseline_systems(baseline, backbones[baseline.model].max_positions, prefix_tokens)
    return select_systems([*_servable(baselines, backbones), *ours], patterns)


def _servable(systems: Sequence[System], backbones: Mapping[str, Backbone]) -> list[System]:
    """Leave out, and say so, what the model has no room or no head for."""
    from pipeline.encode.encoder_fit import require_fit
    from pipeline.errors import CairnError

    reasons: dict[str, str] = {}
    for system in systems:
        config = system.encoding.encoder
        try:
            require_fit(config, backbones[config.model])
        except CairnError as error:
            reasons[system.name] = str(error)
    for reason in dict.fromkeys(reasons.values()):
        click.echo(
            f"left out: {', '.join(name for name, own in reasons.items() if own == reason)}: {reason}",
            err=True,
        )
    return [system for system in systems if system.name not in reasons]


def _require_known(against: str | None, systems: Sequence[System]) -> None:
    from pipeline.errors import ConfigError

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

    from pipeline.evaluate.bench import run_bench
    from pipeline.evaluate.run_files import write_run

    for judged in sets:
        for result in run_bench(judged, systems, context, progress, cache):
            if runs is not None:
                tag = result.system.name.replace("/", "-")
                write_run(runs / judged.name.replace(" ", "-") / f"{tag}.trec", judged, result.run, tag)
            yield replace(result, run=())  # written or not wanted: a table holds too many to keep


def _compare_runs(sets: Sequence[RetrievalSet], paths: tuple[Path, Path], seed: int, *, as_json: bool) -> int:
    from dataclasses import asdict

    from pipeline.errors import ConfigError
    from pipeline.evaluate.measures import measure_run
    from pipeline.evaluate.run_files import read_run
    from pipeline.evaluate.significance import compare_paired

    if len(sets) != 1:
        raise ConfigError(f"--compare must have the one folder both runs were made on, got {len(sets)}")
    first, second = (measure_run(sets[0], read_run(path)) for path in paths)
    compared = {name: compare_paired(first[name], second[name], seed=seed) for name in first}
    if as_json:
        click.echo(json.dumps({name: asdict(comparison) for name, comparison in compared.items()}))
        return 0
    rows = [
        (name, f"{first[name].mean():.4f}", f"{second[name].mean():.4f}", *_compared_cells(comparison))
        for name, comparison in compared.items()
    ]
    click.echo(table([("", *(path.name for path in paths), "difference", "95 % interval", "p"), *rows]))
    return 0


def _report_lengths(
    sets: Sequence[RetrievalSet], base: EncoderConfig, seed: int, *, quiet: bool, as_json: bool
) -> int:
    from dataclasses import asdict

    from pipeline.evaluate.length_collapse import TEMPERATURES, measure_length_collapse

    temperatures = sorted({*TEMPERATURES, base.temperature}, reverse=True)
    with ProgressBars(quiet=quiet) as progress:
        measured = {
            judged.name: measure_length_collapse(
                judged.texts, base, temperatures=temperatures, seed=seed, progress=progress
            )
            for judged in sets
        }
    if as_json:
        click.echo(json.dumps({name: [asdict(row) for row in rows] for name, rows in measured.items()}))
        return 0
    for name, rows in measured.items():
        click.echo(
            f"\n{name}: mean cosine of pieces of different documents, and sigma_a of the last layer's "
            "attention, by τ"
        )
        click.echo(_length_table(rows, temperatures))
    return 0


def _length_table(rows: Sequence[LengthCollapse], temperatures: Sequence[float]) -> str:
    lines: list[Sequence[object]] = [
        (
            "tokens",
            "pieces",
            *(f"cosine τ={value:g}" for value in temperatures),
            *(f"sigma_a τ={value:g}" for value in temperatures),
        )
    ]
    for tokens in dict.fromkeys(row.tokens for row in rows):
        own = [row for row in rows if row.tokens == tokens]
        sigmas = ["" if row.sigma_a is None else f"{row.sigma_a:.3f}" for row in own]
        lines.append((tokens, own[0].pieces, *(f"{row.cosine:.3f}" for row in own), *sigmas))
    return table(lines)


def _show(
    sets: Sequence[RetrievalSet],
    results: Sequence[SystemResult],
    against: str | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    from pipeline.evaluate.bench import evidence_ceiling
    from pipeline.evaluate.report import Report

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
        click.echo("\n".join(_set_lines(judged, report, reference, seed, evidence_ceiling(judged))))
    if len(sets) > 1:
        click.echo(f"\naverage of {len(sets)} sets")
        click.echo(_measure_table(report.averages(), {}))
    click.echo("\n".join(_advice_lines(report.advise(seed), report)))


def _set_lines(
    judged: RetrievalSet, report: Report, reference: str | None, seed: int, ceiling: Mapping[str, float]
) -> Iterator[str]:
    yield (
        f"\n{judged.name}: {thousands(len(judged.doc_ids))} documents, "
        f"{thousands(len(judged.query_ids))} queries"
    )
    for reason, count in judged.skipped.items():
        yield f"  left out: {thousands(count)} {reason}"
    own = {name: results[report.set_names.index(judged.name)] for name, results in report.by_system.items()}
    means = {name: result.means() for name, result in own.items()}
    yield _measure_table(
        {**means, **({"(best possible)": ceiling} if ceiling else {})},
        {name: result.cost for name, result in own.items()},
    )
    others = [name for name, result in own.items() if name != reference and not result.system.is_baseline]
    if reference is not None and others:
        yield f"\n{judged.name}: difference from {reference}"
        yield table(_difference_rows(judged.name, report, others, reference, seed))


def _difference_rows(
    set_name: str, report: Report, names: Sequence[str], reference: str, seed: int
) -> Iterator[Sequence[str]]:
    from pipeline.evaluate.bench import primary_measures

    measures = primary_measures(report.by_system[reference][report.set_names.index(set_name)].values)
    yield ("", *(cell for measure in measures for cell in (measure, "95 % interval", "p")))
    for name in names:
        compared = [dict(report.compare(name, reference, measure, seed))[set_name] for measure in measures]
        yield (name, *(cell for comparison in compared for cell in _compared_cells(comparison)))


def _compared_cells(comparison: Comparison) -> tuple[str, str, str]:
    return (
        f"{comparison.difference:+.4f}",
        f"{comparison.low:+.4f} to {comparison.high:+.4f}",
        f"{comparison.p_value:.4f}",
    )


def _measure_table(means: Mapping[str, Mapping[str, float]], costs: Mapping[str, Cost]) -> str:
    from pipeline.evaluate.report import measures_shown

    names = measures_shown(means)
    rows: list[Sequence[str]] = [("", *names, *(("encode", "index", "query") if costs else ()))]
    for system, own in means.items():
        cells = [f"{own[name]:.4f}" if name in own else "" for name in names]
        rows.append(
            (system, *cells, *(_cost_cells(costs[system]) if system in costs else ("",) * 3 if costs else ()))
        )
    return table(rows)


def _cost_cells(cost: Cost) -> tuple[str, str, str]:
    return duration(cost.encode_seconds), size(cost.index_bytes), f"{cost.query_milliseconds:.1f} ms"


def _advice_lines(advice: Sequence[Advice], report: Report) -> Iterator[str]:
    from pipeline.evaluate.report import MAX_LOSS

    for title, own in zip(
        ("use", f"cheaper, and worse by at most {MAX_LOSS:g} (95 %)"), advice, strict=False
    ):
        yield f"\n{title}: {own.system}   (quality {own.quality:.4f})"
        yield f"  ingest … {own.ingest_flags}".rstrip()
        yield f"  cairn search … {own.search_flags}".rstrip()
        speed = own.tokens / own.encode_seconds if own.encode_seconds else 0.0
        yield (
            f"  costs {duration(own.encode_seconds)} to encode {thousands(own.tokens)} tokens "
            f"({thousands(speed)} a second), "
            f"{size(own.index_bytes)} of vectors and BM25, {own.query_milliseconds:.1f} ms to encode a query"
        )
    best = report.best_baseline()
    if advice and best is not None and report.quality(best) > advice[0].quality:
        yield f"\nthe baseline {best} is better here (quality {report.quality(best):.4f})"
