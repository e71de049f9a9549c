"""TREC run files: what was ranked for each query, in the six columns every retrieval tool reads.

    query_id Q0 doc_id rank score tag

Ids hold no white space: the set they come from was checked for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cairn.pipeline import durable
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.evaluate.measures import RankedDocuments
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet

_LINE = re.compile(
    r"(?P<query>\S+)\s+\S+\s+(?P<document>\S+)\s+\S+\s+(?P<score>[-+]?\d+(\.\d*)?([eE][-+]?\d+)?)\s+\S+"
)


def write_run(path: Path, judged: RetrievalSet, run: Sequence[RankedDocuments], tag: str) -> None:
    """Write a run durably, queries in the set's order; the folder is made."""
    lines = [
        f"{query_id} Q0 {judged.doc_ids[position]} {rank} {score!r} {tag}\n"
        for query_id, ranked in zip(judged.query_ids, run, strict=True)
        for rank, (position, score) in enumerate(
            zip(ranked.positions.tolist(), ranked.scores.tolist(), strict=True), start=1
        )
    ]
    with durable.storage_errors(f"writing the run {path.name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(path, "".join(lines).encode())


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Return a run as query id to document id to score.

    A line that is not one of a run raises :class:`SourceError`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"a run must be a readable text file, got {str(path)!r}; name one that `--runs` wrote"
        ) from error
    run: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if not match:
            raise SourceError(
                f"line {number} of {path.name} must read `query_id Q0 doc_id rank score tag`, got "
                f"{line[:80]!r}; mend it"
            )
        run.setdefault(match["query"], {})[match["document"]] = float(match["score"])
    return run
