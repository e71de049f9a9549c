"""One run of the line: its identity, the checks before it and the record after it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from jobs.engine import Engine
from jobs.job_file import IngestJobName
from pipeline import durable
from pipeline.config import IngestConfig
from pipeline.corpus.parquet import Scan
from pipeline.corpus.staging import Staged
from pipeline.errors import FingerprintMismatchError
from pipeline.index.layout import CollectionLayout
from pipeline.manifest import Manifest
from pipeline.model.folders.embedded_weights import MODEL_NAMES
from pipeline.model.folders.names import model_folder
from pipeline.types import IngestReport, ProgressListener

SPEED_ONLY = frozenset({"precision", "backend", "batch_tokens"})
"""Encoder settings that move no vector beyond rounding: they may differ from run to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One ingest under the writer lock: what it reads, what it stands on, who encodes and who listens."""

    run_id: str
    layout: CollectionLayout
    scan: Scan
    config: IngestConfig
    published: Manifest | None
    progress: StageWatch
    engine: Engine
    job: IngestJobName = "build_index"

    @property
    def publishes(self) -> bool:
        """Whether the run ends with a generation, and not with work for the next job."""
        return self.job in ("build_index", "write_index")

    def warnings(self, staged: Staged) -> tuple[str, ...]:
        """Return what the user should know although the run went through."""
        if self.config.sync and not staged.is_complete:
            kept = (
                "--sync deleted nothing: documents of a damaged source file cannot be told from vanished ones"
            )
            return (*self.scan.warnings, kept)
        return self.scan.warnings


class StageWatch:
    """Passes progress on and notes how long each stage took, by the time its name was first heard."""

    def __init__(self, listener: ProgressListener) -> None:
        self._listener = listener
        self._started_seconds = time.monotonic()
        self._stage: str | None = None
        self._stage_started_seconds = self._started_seconds
        self._finished: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Note the stage and pass the report on."""
        if stage != self._stage:
            self._close()
            self._stage = stage
        self._listener(stage, done, total, unit)

    def _close(self) -> None:
        now = time.monotonic()
        if self._stage is not None:
            self._finished[self._stage] = (
                self._finished.get(self._stage, 0.0) + now - self._stage_started_seconds
            )
        self._stage_started_seconds = now

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage heard so far; the current one counts up to now."""
        self._close()
        return dict(self._finished)

    @property
    def seconds(self) -> float:
        """Seconds since the watch was made."""
        return time.monotonic() - self._started_seconds


def new_run_id() -> str:
    """Name a run so that names sort by time and never collide."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def require_same_settings(published: Manifest | None, config: IngestConfig) -> None:
    """Refuse settings that would mix vectors, clusters or contexts of two kinds in one collection; the model may lie elsewhere now.

    Raises :class:`FingerprintMismatchError` naming each setting that differs.
    """
    if published is None:
        return
    asked, defaults = config.to_dict(), IngestConfig().to_dict()
    # Where the model lies says nothing; whether it is the same is asked of its weights.
    del asked["encoder"]["model"]
    # A setting younger than the collection had its default when the collection was built.
    stored = {
        stage: {**defaults[stage], **published.settings[stage]} for stage in ("encoder", "cluster", "context")
    }
    differences = [
        f"{stage}.{name} is {settings[name]!r}, got {value!r}"
        for stage, settings in stored.items()
        for name, value in asked[stage].items()
        if name not in SPEED_ONLY and settings[name] != value and not _follows(name, settings, asked[stage])
    ]
    if differences:
        raise FingerprintMismatchError(
            f"collection {published.collection!r} must keep the settings it was built with: "
            f"{'; '.join(differences)}; "
            f"leave them out, or use a new collection"
        )


def is_repointed(published: Manifest | None, config: IngestConfig) -> bool:
    """Say whether the collection's model is looked for elsewhere than when it was built."""
    return published is not None and published.settings["encoder"]["model"] != config.encoder.model


def may_have_another_model(published: Manifest, config: IngestConfig) -> bool:
    """Say whether the model must be compared though nothing is encoded.

    It lies elsewhere, or its files are younger than the collection.
    """
    if is_repointed(published, config):
        return True
    if config.encoder.model in MODEL_NAMES:
        return False  # its hash is fixed
    published_seconds = datetime.fromisoformat(published.created_at).timestamp()
    files = (path.stat() for path in model_folder(config.encoder.model).rglob("*") if path.is_file())
    # The manifest counts whole seconds.
    return any(int(file.st_mtime) > published_seconds for file in files)


def _follows(name: str, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether a setting nobody gave differs because another one does: a shorter window's overlap."""
    return name == "window_overlap_tokens" and stored["max_window_tokens"] != asked["max_window_tokens"]


def describe_reasons(reasons: Mapping[str, int]) -> str:
    """Write quarantine reasons as ``empty_text: 5, null_id: 1``."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))


def record_run(run: Run, report: IngestReport) -> None:
    """Write ``runs/<run_id>.json``: what was asked for, what was read and what was done."""
    run.layout.runs_folder.mkdir(exist_ok=True)
    content: dict[str, Any] = {
        "run_id": run.run_id,
        "job": run.job,
        "settings": run.config.to_dict(),
        "sources": source_names(run.scan),
        "damaged_files": [{"file": file.name, "reason": reason} for file, reason in run.scan.damaged_files],
        "report": {**asdict(report), "warnings": list(report.warnings)},
    }
    with durable.storage_errors("recording the run"):
        durable.write_json(run.layout.run_path(run.run_id), content)


def source_names(scan: Scan) -> Sequence[str]:
    """List the source files as the user named them."""
    return [file.name for file in scan.files]
