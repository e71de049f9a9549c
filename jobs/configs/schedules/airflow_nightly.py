"""An Airflow 3 DAG that brings a collection up to date every night.

Copy it into the folder of DAGs of a machine that has Cairn. An ingest is idempotent: a retry after a kill, or
after exit code 75 (another run holds the collection), goes on where the last one stopped.
"""

# pyright: reportMissingImports=false
# Airflow is where this file is copied to, not here.

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from airflow.timetables.trigger import CronTriggerTimetable

INGEST = "ingest /srv/articles --collection handbook --root /srv/cairn/cairn-data --sync --quiet --json"

with DAG(
    dag_id="cairn_ingest_handbook",
    schedule=CronTriggerTimetable("30 2 * * *", timezone="Europe/Vienna"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
):
    BashOperator(
        task_id="ingest",
        # 3 means done, with quarantined rows, which Airflow would take for a failure.
        bash_command=f'{INGEST}; code=$?; [ "$code" -eq 3 ] || exit "$code"',
        retries=6,
        retry_delay=timedelta(minutes=1),
        retry_exponential_backoff=True,
    )
