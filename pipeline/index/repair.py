"""Bring a damaged collection back to something whole, losing as little as possible.

    only derived files damaged      ─▶ made again from Lance, published as a new generation
    files damaged in a store        ─▶ written to it again from this machine's copy
    anything else                   ─▶ CURRENT returns to the newest generation that is whole
    nothing whole                   ─▶ refused: the rows must be ingested again

Never touches a row. Damage is found by ``verify``; what cannot be made again is the context, the clusters and
Lance itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import IndexConfig
from pipeline.durable import storage_errors
from pipeline.errors import IntegrityError
from pipeline.index.generation import read_manifest
from pipeline.index.lance_index import LanceTables
from pipeline.index.layout import CollectionLayout
from pipeline.index.publish import (
    GenerationFacts,
    prepare_writer,
    publish_generation,
    remove_generations,
    serve_generation,
)
from pipeline.index.verify import Problem, read_current, store_problems, verify_generation
from pipeline.manifest import Manifest
from pipeline.types import ProgressListener, silent_progress

REPAIR_RUN_ID = "repair"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What a repair found and did; ``generation`` is served now, ``action`` is a sentence."""

    generation: int
    action: str
    problems: tuple[Problem, ...]


def index_config_of(settings: Mapping[str, Any]) -> IndexConfig:
    """Return the index settings that a manifest's resolved settings carry."""
    return IndexConfig(**settings["index"])


def repair_collection(layout: CollectionLayout, progress: ProgressListener = silent_progress) -> RepairReport:
    """Repair under the lock.

    A whole collection is left as it is, a hopeless one raises :class:`IntegrityError`.
    """
    layout.require_exists()
    with layout.writer_lock():
        report = _restore(layout, _repair(layout, progress))
        return replace(
            report, problems=(*report.problems, *_drop_damaged_predecessors(layout, report.generation))
        )


def _restore(layout: CollectionLayout, report: RepairReport) -> RepairReport:
    """Write to the store what it has no more of the generation served now."""
    lacking = store_problems(layout, report.generation)
    if not lacking or layout.replica is None:
        return report
    layout.replica.restore(report.generation, [problem.file for problem in lacking])
    action = f"{len(lacking)} file(s) of generation {report.generation} were written to the store again"
    return replace(report, action=action, problems=(*report.problems, *lacking))


def _repair(layout: CollectionLayout, progress: ProgressListener) -> RepairReport:
    current, problems = read_current(layout)
    served = None if current is None else current.served
    found: dict[int, list[Problem]] = {}
    if served is not None:
        found[served] = verify_generation(layout, served, check_rows=True)
        problems += found[served]
        if not problems:
            prepare_writer(layout)
            return RepairReport(
                generation=served, action=f"generation {served} is whole; nothing to repair", problems=()
            )
        if all(problem.part == "derived" for problem in problems):
            manifest = _rebuild(layout, read_manifest(layout, served), progress)
            action = (
                f"files of generation {served} were made again from its rows and published as "
                f"generation {manifest.generation}"
            )
            return RepairReport(generation=manifest.generation, action=action, problems=tuple(problems))
    for number in sorted(layout.generation_numbers(), reverse=True):
        if served is not None and number > served:
            continue
        if number not in found:
            found[number] = verify_generation(layout, number, check_rows=True)
        if all(problem.part == "derived" for problem in found[number]):
            return _return_to(layout, number, found[number], problems, progress)
    raise IntegrityError(
        f"collection {layout.name!r} has no generation that is whole: "
        f"{'; '.join(problem.sentence for problem in problems[:3])}; "
        "move its folder away and ingest the sources again"
    )


def _return_to(
    layout: CollectionLayout,
    number: int,
    own: list[Problem],
    problems: list[Problem],
    progress: ProgressListener,
) -> RepairReport:
    """Serve generation ``number`` again and undo in Lance what came after it."""
    with storage_errors(f"returning {layout.name!r} to generation {number}"):
        serve_generation(layout, number)
        remove_generations(layout, [newer for newer in layout.generation_numbers() if newer > number])
    manifest = read_manifest(layout, number)
    if own:
        manifest = _rebuild(layout, manifest, progress)
    else:
        LanceTables.open(layout).roll_back(manifest.lance_versions)
    action = (
        f"the collection returned to generation {number}, published "
        f"{read_manifest(layout, number).created_at}"
    )
    return RepairReport(generation=manifest.generation, action=action, problems=tuple(problems))


def _drop_damaged_predecessors(layout: CollectionLayout, served: int) -> list[Problem]:
    """Remove older generations that could not be served any more; they would only be found damaged again."""
    found = {
        number: verify_generation(layout, number, check_rows=False)
        for number in layout.generation_numbers()
        if number < served
    }
    damaged = [number for number, problems in found.items() if problems]
    if damaged:
        with storage_errors(f"removing damaged generations of {layout.name!r}"):
            remove_generations(layout, damaged)
        LanceTables.open(layout).keep_only(layout.generation_numbers())
    return [problem for problems in found.values() for problem in problems]


def _rebuild(layout: CollectionLayout, manifest: Manifest, progress: ProgressListener) -> Manifest:
    """Publish the rows of a generation again, with derived files built from them."""
    prepare_writer(layout)
    tables = LanceTables.open(layout)
    tables.roll_back(manifest.lance_versions)
    versions = tables.versions()
    tables.tag(manifest.generation + 1, versions)
    facts = GenerationFacts.of(layout, manifest, REPAIR_RUN_ID)
    return publish_generation(layout, tables, versions, facts, index_config_of(manifest.settings), progress)
