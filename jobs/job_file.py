"""A job in a file: which verb it runs, with what it is always told; ``jobs/configs`` has files of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.settings_file import read_settings_file

JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster_corpus": ("ingest", "--step", "cluster"),
    "encode_corpus": ("ingest", "--step", "encode"),
    "write_index": ("ingest", "--step", "write"),
    "build_index": ("ingest",),
    "train_encoder": ("train",),
    "pretrain_encoder": ("pretrain",),
    "compress_model": ("compress",),
    "distill_encoder": ("distill",),
}
"""The verb of each job, with what it is always told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of a file; ``subject`` is what it works on: a collection, or the folder of a run."""

    name: str
    subject: str


def read_job(path: Path) -> Job:
    """Read which job a file is; raise :class:`ConfigError` where it is none."""
    file = read_settings_file(path)
    if file.job not in JOBS:
        raise ConfigError(f"{path}: job must be one of {', '.join(JOBS)}, got {file.job!r}")
    verb = JOBS[file.job][0]
    subject = {**file.shared, **file.tables.get(verb, {})}.get("collection" if verb == "ingest" else "output")
    return Job(name=file.job, subject=Path(str(subject)).name)
