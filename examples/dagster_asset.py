"""A collection as a Dagster asset, brought up to date every night.

    dagster dev --python-file examples/dagster_asset.py

For Airflow see ``jobs/configs/schedules/airflow_nightly.py``.
"""

from __future__ import annotations

import os

import cairn
import dagster as dg
from cairn.pipeline.errors import CollectionNotFoundError, TryAgainError


@dg.asset
def handbook() -> dg.MaterializeResult:
    """The collection ``handbook``, made of the articles at ``ARTICLES``."""
    try:
        collection = cairn.open_collection("handbook")
    except CollectionNotFoundError:
        collection = cairn.Collection.create("handbook")
    try:
        report = collection.sync(os.environ["ARTICLES"])
    except TryAgainError as error:  # another writer holds the collection, or the disk is full
        raise dg.RetryRequested(max_retries=6, seconds_to_wait=60) from error
    return dg.MaterializeResult(
        metadata={
            "generation": report.generation,
            "indexed": report.indexed,
            "deleted": report.deleted,
            "quarantined": report.quarantined,
        }
    )


nightly = dg.ScheduleDefinition(
    name="handbook_nightly",
    target=[handbook],
    cron_schedule="30 2 * * *",
    execution_timezone="Europe/Vienna",
)
