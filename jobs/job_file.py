"""A job in a file of settings: which verb it runs, and what the verb's table says.

The file is one that :mod:`cairn.pipeline.settings_file` reads; :data:`VERBS` says which table a job takes.
Relative paths start from the working folder. ``jobs/configs`` has files of every job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cairn.jobs.engine_settings import EngineConfig, engine_of
from cairn.pipeline.config import DEFAULT_ROOT, IngestConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.ingest_settings import STAGES
from cairn.pipeline.options import did_you_mean, options_of
from cairn.pipeline.settings_file import SHARED, check_setting, read_settings_file

VERBS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cluster_corpus", "encode_corpus", "write_index", "build_index"), "ingest"),
    "train_encoder": "train",
    "pretrain_encoder": "pretrain",
    "compress_model": "compress",
    "distill_encoder": "distill",
}
"""The verb of each job."""

_Config = TypeVar("_Config")
LIST: Final = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of a file; ``settings`` are those of its verb, by option name with underscores."""

    path: Path
    name: str
    settings: Mapping[str, Any]

    @property
    def subject(self) -> str:
        """What the job works on, for its name: a collection, or the folder of a run."""
        return Path(str(self.settings.get("collection" if VERBS[self.name] == "ingest" else "output"))).name

    def options(
        self, *kinds: type, own: Mapping[str, Any], required: Sequence[str] = ()
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the job's own settings, and the fields of each dataclass that are set.

        ``own`` has their types: a list is () and another None where it is not set. Raises
        :class:`ConfigError` for what is neither, of another type, or missing.
        """
        rest = dict(self.settings)
        fields = [_taken(rest, kind) for kind in kinds]
        for key, value in rest.items():
            if key not in own and key not in SHARED:
                known = [*own, *(name for kind in kinds for name in options_of(kind))]
                raise ConfigError(f"{self._where} has no setting {key!r}{did_you_mean(key, known)}")
            if own.get(key, object) is not object:
                check_setting(f"{self._where} {key}", own[key], value)
        for key in required:
            if key not in rest:
                raise ConfigError(f"{self._where} {key} must be given")
        return {key: rest.get(key, () if kind is LIST else None) for key, kind in own.items()}, fields

    def config(
        self, kind: type[_Config], own: Mapping[str, Any], required: Sequence[str]
    ) -> tuple[dict[str, Any], _Config]:
        """Return the job's own settings and those of a run, checked before anything is loaded."""
        found, [fields] = self.options(kind, own=own, required=required)
        for name, each in options_of(kind).items():
            if each.is_required and name not in fields:
                raise ConfigError(f"{self._where} {name} must be given")
        try:
            return found, kind(**fields)
        except ConfigError as error:
            raise ConfigError(f"{self._where} {error}") from error

    @property
    def _where(self) -> str:
        return f"{self.path}: [{VERBS[self.name]}]"


def _taken(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take the options of a dataclass out of a verb's settings, by field."""
    keys = {each.flag[2:].replace("-", "_"): each for each in options_of(kind).values() if each.about.help}
    found = {key: settings.pop(key) for key in list(settings) if key in keys}
    return {keys[key].name: tuple(each) if isinstance(each, list) else each for key, each in found.items()}


def read_job(path: Path, name: str | None = None) -> Job:
    """Read the job of a file, or the one that is named; raise :class:`ConfigError` where there is none."""
    found = read_settings_file(path)
    name = name or found.job
    if name not in VERBS:
        raise ConfigError(f"{path}: job must be one of {', '.join(VERBS)}, got {name!r}")
    return Job(path=path, name=name, settings={**found.shared, **found.tables.get(VERBS[name], {})})


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestJob:
    """What a job of an ingest works on, with which settings by stage, and where it encodes."""

    sources: tuple[str, ...]
    root: str
    collection: str
    chosen: Mapping[str, Any]
    engine: EngineConfig


def ingest_of(job: Job) -> IngestJob:
    """Read a job of an ingest."""
    own, [of_run, of_engine, *stages] = job.options(
        IngestConfig,
        EngineConfig,
        *STAGES.values(),
        own={"sources": LIST, **dict.fromkeys((*SHARED, "engine"), str), "workers": object},
        required=("sources", "collection"),
    )
    try:
        engine = engine_of({**of_engine, **{key: own[key] for key in ("engine", "workers") if own[key]}})
    except ConfigError as error:
        raise ConfigError(f"{job.path}: [ingest] {error}") from error
    return IngestJob(
        sources=tuple(own["sources"]),
        root=own["root"] or DEFAULT_ROOT,
        collection=own["collection"],
        chosen={**dict(zip(STAGES, stages, strict=True)), **of_run},
        engine=engine,
    )
