"""A job in a TOML file: what to run, on which sources, with which settings.

    job = "encode_corpus"                   one of JOBS
    sources = ["articles/"]
    collection = "handbook"
    root = "cairn-data"

    [engine]                                fields of EngineConfig
    max_workers = 4

    [encoder]                               settings of a stage: corpus, cluster, context, encoder or index
    landmark_interval = 64

``train_encoder`` has sources or documents, output, base and judged instead, and its settings under
``[train]``; ``pretrain_encoder`` has sources, output, base and from_config, and ``[pretrain]``;
``compress_model`` has texts, output, model and judged, and ``[compress]``; ``distill_encoder`` has teacher,
student, texts and output, and ``[distill]``. Relative paths start from the working folder. ``jobs/configs``
has files of every job.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from cairn.jobs.engine_settings import EngineConfig
from cairn.pipeline.config import BASE_MODEL, DEFAULT_ROOT
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.ingest import IngestJobName
from cairn.pipeline.line.ingest_settings import STAGES

JobName = Literal[
    "cluster_corpus",
    "encode_corpus",
    "write_index",
    "build_index",
    "train_encoder",
    "pretrain_encoder",
    "compress_model",
    "distill_encoder",
]
JOBS: Final[tuple[str, ...]] = get_args(JobName)

_RESOURCES: Final = {"cpus": (int, float), "gpus": (int, float)}


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestJob:
    """One of the jobs of an ingest.

    ``stages`` are settings by stage and field, ``engine`` those of :class:`EngineConfig`.
    """

    job: IngestJobName
    sources: tuple[str, ...]
    collection: str
    root: str = DEFAULT_ROOT
    sync: bool = False
    reread: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    cpus: float = 0
    gpus: float = 0

    @property
    def subject(self) -> str:
        """What the job works on, for its name."""
        return self.collection


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """A training run; ``settings`` are those of :class:`cairn.pipeline.lab.train.settings.TrainConfig`."""

    job: Literal["train_encoder"]
    output: str
    sources: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    base: str = BASE_MODEL
    judged: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cpus: float = 0
    gpus: float = 0

    @property
    def subject(self) -> str:
        """What the job works on, for its name."""
        return Path(self.output).name


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainJob:
    """A pretraining; ``settings`` are those of :class:`PretrainConfig`."""

    job: Literal["pretrain_encoder"]
    output: str
    sources: tuple[str, ...]
    base: str = BASE_MODEL
    from_config: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cpus: float = 0
    gpus: float = 0

    @property
    def subject(self) -> str:
        """What the job works on, for its name."""
        return Path(self.output).name


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressJob:
    """A compression; ``settings`` are those of :class:`CompressConfig`."""

    job: Literal["compress_model"]
    output: str
    texts: tuple[str, ...]
    model: str = BASE_MODEL
    judged: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cpus: float = 0
    gpus: float = 0

    @property
    def subject(self) -> str:
        """What the job works on, for its name."""
        return Path(self.output).name


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillJob:
    """A distillation; ``settings`` are those of :class:`DistillConfig`."""

    job: Literal["distill_encoder"]
    teacher: str
    student: str
    texts: tuple[str, ...]
    output: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cpus: float = 0
    gpus: float = 0

    @property
    def subject(self) -> str:
        """What the job works on, for its name."""
        return Path(self.output).name


def read_job(path: Path) -> IngestJob | TrainJob | PretrainJob | CompressJob | DistillJob:
    """Read a job; raise :class:`ConfigError` for a file that is no job and for an unknown key or value."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"a job must be a TOML file, got {str(path)!r}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} must be nested less deeply; remove the deep table or list") from error
    name = content.get("job")
    if name not in JOBS:
        raise ConfigError(f"{path}: job must be one of {', '.join(JOBS)}, got {name!r}")
    # What the process that reads the file needs of its machine; only a submission asks for it.
    resources = _table(path, content, "resources", _RESOURCES)
    if name == "train_encoder":
        settings = _settings(path, content, "train")
        known = {"output": str, "sources": list, "documents": list, "base": str, "judged": list}
        values = _checked(path, content, known, required=("output",))
        return TrainJob(job="train_encoder", settings=settings, **values, **resources)
    if name == "pretrain_encoder":
        settings = _settings(path, content, "pretrain")
        known = {"output": str, "sources": list, "base": str, "from_config": str}
        values = _checked(path, content, known, required=("output", "sources"))
        return PretrainJob(job="pretrain_encoder", settings=settings, **values, **resources)
    if name == "compress_model":
        settings = _settings(path, content, "compress")
        known = {"output": str, "texts": list, "model": str, "judged": list}
        values = _checked(path, content, known, required=("output", "texts"))
        return CompressJob(job="compress_model", settings=settings, **values, **resources)
    if name == "distill_encoder":
        settings = _settings(path, content, "distill")
        known = {"teacher": str, "student": str, "texts": list, "output": str}
        values = _checked(path, content, known, required=tuple(known))
        return DistillJob(job="distill_encoder", settings=settings, **values, **resources)
    kinds: Mapping[str, Any] = {item.name: object for item in fields(EngineConfig)}
    engine = _table(path, content, "engine", kinds)
    stages = {
        stage: _table(path, content, stage, {item.name: object for item in fields(kind)})
        for stage, kind in STAGES.items()
    }
    values = _checked(
        path,
        content,
        {"sources": list, "collection": str, "root": str, "sync": bool, "reread": bool},
        required=("sources", "collection"),
    )
    return IngestJob(job=name, engine=_engine(path, engine), stages=stages, **values, **resources)


def _settings(path: Path, content: dict[str, Any], name: str) -> Mapping[str, Any]:
    """Take the table of a run's settings out; what stands in it is checked where the run begins."""
    settings: Any = content.pop(name, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: {name} must be a table, got {settings!r}")
    return _tuples(cast("Mapping[str, Any]", settings))


def _engine(path: Path, values: dict[str, Any]) -> EngineConfig:
    """Return the engine; on a cluster, which says where it is, that is Ray unless the file says otherwise."""
    address = values.pop("address", None) or os.environ.get("RAY_ADDRESS")
    name = values.pop("name", None) or ("ray" if address else "local")
    try:
        return EngineConfig(name=name, address=address if name == "ray" else None, **values)
    except ConfigError as error:
        raise ConfigError(f"{path}: [engine] {error}") from error


def _table(path: Path, content: dict[str, Any], name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    table = content.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table, got {table!r}")
    return _checked(path, cast("dict[str, Any]", table), known, where=f"[{name}] ")


def _checked(
    path: Path,
    content: Mapping[str, Any],
    known: Mapping[str, Any],
    *,
    required: tuple[str, ...] = (),
    where: str = "",
) -> dict[str, Any]:
    values = {key: value for key, value in content.items() if key != "job"}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: {where}must not have {key!r}; there are {', '.join(known)}")
        if not isinstance(value, known[key]):
            raise ConfigError(f"{path}: {where}{key} must be {_words(known[key])}, got {value!r}")
    for key in required:
        if key not in values:
            raise ConfigError(f"{path}: {where}{key} must be given")
    for key, value in values.items():
        if known[key] is list and not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{path}: {where}{key} must be a list of texts, got {value!r}")
    return _tuples(values)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for key, value in values.items()
    }


def _words(kind: Any) -> str:
    return {list: "a list of texts", str: "a text", bool: "true or false"}.get(kind, "a number")
