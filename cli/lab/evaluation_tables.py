"""Tables of `cairn evaluate` for people: measures, differences, advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cairn.cli.terminal import duration, size, table, thousands

if TYPE_CHECKING:
    from cairn.pipeline.lab.evaluate.bench import Cost
    from cairn.pipeline.lab.evaluate.context_ablation import AblationRow
    from cairn.pipeline.lab.evaluate.report import Report
    from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
    from cairn.pipeline.lab.evaluate.significance import Comparison


def set_lines(
    judged: RetrievalSet, report: Report, reference: str | None, seed: int, ceiling: Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines on one judged set: what it holds, measures of every system, differences."""
    yield (
        f"\n{judged.name}: {thousands(len(judged.doc_ids))} documents, "
        f"{thousands(len(judged.query_ids))} queries"
    )
    for reason, count in judged.skipped.items():
        yield f"  left out: {thousands(count)} {reason}"
    own = {name: results[report.set_names.index(judged.name)] for name, results in report.by_system.items()}
    means = {name: result.means() for name, result in own.items()}
    yield measure_table(
        {**means, **({"(best possible)": ceiling} if ceiling else {})},
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
        yield (name, *(cell for comparison in compared for cell in compared_cells(comparison)))


def compared_cells(comparison: Comparison) -> tuple[str, str, str]:
    """Return a difference, its interval and its p-value as cells."""
    return (
        f"{comparison.difference:+.4f}",
        f"{comparison.low:+.4f} to {comparison.high:+.4f}",
        f"{comparison.p_value:.4f}",
    )


def measure_table(means: Mapping[str, Mapping[str, float]], costs: Mapping[str, Cost]) -> str:
    """Return the table of systems and their measures, with their costs where there are some."""
    from cairn.pipeline.lab.evaluate.report import measures_shown

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


def advice_lines(report: Report, seed: int) -> Iterator[str]:
    """Yield which configuration to use, what it costs, and what is noise."""
    own = report.advise(seed)
    if own is None:
        return
    speed = own.tokens / own.encode_seconds if own.encode_seconds else 0.0
    yield f"\nuse: {own.system}   (quality {own.quality:.4f})"
    yield f"  ingest SOURCE --collection NAME {own.ingest_flags}".rstrip()
    yield f"  cairn search QUERY --collection NAME {own.search_flags}".rstrip()
    yield (
        f"  costs {duration(own.encode_seconds)} to encode {thousands(own.tokens)} tokens "
        f"({thousands(speed)} a second), "
        f"{size(own.index_bytes)} of vectors and BM25, {own.query_milliseconds:.1f} ms to encode a query"
    )
    yield from _noise_lines(report, own.system, seed)
    best = report.best_baseline()
    if best is not None and report.quality(best) > own.quality:
        yield f"\nthe baseline {best} is better here (quality {report.quality(best):.4f})"


def _noise_lines(report: Report, name: str, seed: int) -> Iterator[str]:
    alike = sorted(report.not_told_apart(name, seed).items(), key=lambda item: -item[1].difference)
    if not alike:
        return
    yield f"\nnoise: how these rows differ from {name} may be chance; judge more queries to tell"
    yield table(
        [("", "difference", "95 % interval", "p")] + [(other, *compared_cells(each)) for other, each in alike]
    )


def context_table(rows: Sequence[AblationRow]) -> str:
    """Return the table of contexts, each compared with the first."""
    lines: list[Sequence[object]] = [
        ("context", "documents", "tokens", "nDCG@10", "difference", "95 % interval", "p")
    ]
    for row in rows:
        compared = ("", "", "") if row.comparison is None else compared_cells(row.comparison)
        lines.append((row.name, row.context_documents, row.max_document_tokens, f"{row.ndcg:.4f}", *compared))
    return table(lines)
