"""Bring a collection up to date with a folder, from a job of your own scheduler.

    python examples/nightly_sync.py handbook articles/

Ends with 75 where another writer holds the collection or the disk is full: try again later.
``cairn schedule`` does the same without a program.
"""

from __future__ import annotations

import sys

import cairn
from cairn.pipeline.errors import CollectionNotFoundError, TryAgainError


def sync(name: str, source: str) -> cairn.IngestReport:
    """Make the collection hold what the source holds, and return what was done."""
    try:
        collection = cairn.open_collection(name)
    except CollectionNotFoundError:
        collection = cairn.Collection.create(name)
    return collection.sync(source)


def main() -> int:
    """Sync, and print a line."""
    try:
        report = sync(*sys.argv[1:3])
    except TryAgainError as error:
        print(error, file=sys.stderr)
        return 75
    print(f"{report.indexed} indexed, {report.deleted} deleted, {report.unchanged} unchanged")
    for reason, count in report.quarantine_reasons.items():
        print(f"{count} rows refused: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
