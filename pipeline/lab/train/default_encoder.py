"""Train an encoder from texts and pairs to model in one command: `python -m cairn.jobs.train_default --help`.

    pairs, texts ─▶ without judged texts ─▶ WORK/pairs.parquet, WORK/texts.parquet
                 ─▶ landmarks follow the base's means ─▶ WORK/landmarks ─▶ --deliver/landmarks
                 ─▶ contrast behind a context         ─▶ WORK/run       ─▶ --deliver

What is prepared has no text of the judged sets: with --prepare-only it is made where the data lies and then
sent to the machine with the GPU. A run that is killed, or stopped by --minutes, goes on from the newest
checkpoint of its stage when the same command runs again, also from a copy of WORK on another machine.
Settings are those of jobs/configs/train_default.toml, a table a stage; --set changes one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.errors import CairnError, ConfigError
from cairn.pipeline.lab.train.settings import LandmarkConfig, TrainConfig
from cairn.pipeline.line.progress_log import ProgressLog
from cairn.pipeline.options import check_names
from cairn.pipeline.settings_file import read_settings_file
from cairn.pipeline.types import ProgressListener

DELIVERED: Final = ("best", "model")
_OF_THE_VERB: Final = ("base", "sources", "texts", "output")
"""Settings of a table that this command sets itself; a verb reads them where it runs the file alone."""


def prepare_texts(texts: Sequence[Path], judged: Sequence[Path], target: Path) -> None:
    """Write texts that are none of the judged sets' as Parquet."""
    from cairn.pipeline.lab.train.landmark_distillation import read_documents

    documents, _ = read_documents(texts, judged)
    _write(target, pa.Table.from_pylist([{"title": one.title, "text": one.text} for one in documents]))


def prepare_pairs(
    pairs: Sequence[Path], judged: Sequence[Path], target: Path, progress: ProgressListener
) -> int:
    """Write pairs that are none of the judged sets' as Parquet; return their number."""
    from cairn.pipeline.lab.train.leakage import without_judged
    from cairn.pipeline.lab.train.pairs import read_pairs

    kept = without_judged(read_pairs(pairs), judged, progress)
    texts = ("query", "document", "title", "source", "instruction")
    columns = pa.schema([*((name, pa.string()) for name in texts), ("negatives", pa.list_(pa.string()))])
    _write(target, pa.Table.from_pylist([row._asdict() for row in kept.rows], columns))
    return len(kept)


def _write(target: Path, table: pa.Table) -> None:
    with durable.storage_errors(f"writing {target.name}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(target) as temporary:
            pq.write_table(table, temporary, compression="zstd", compression_level=12)


def settings_of(config: Path, changes: Sequence[str]) -> tuple[LandmarkConfig, TrainConfig]:
    """Return the settings of both stages: a file's, with changes such as ``train.steps=200``."""
    tables = {name: dict(table) for name, table in read_settings_file(config).tables.items()}
    for change in changes:
        try:
            [(stage, changed)] = tomllib.loads(change).items()
            changes_of_stage = {name.replace("-", "_"): value for name, value in changed.items()}
            tables[stage] |= changes_of_stage
        except (tomllib.TOMLDecodeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"--set must be STAGE.NAME=VALUE with a stage of {', '.join(tables)} and a value as in TOML, "
                f"got {change!r}"
            ) from error
        if set_here := changes_of_stage.keys() & {*_OF_THE_VERB}:
            raise ConfigError(
                f"--set must change no {min(set_here)}, got {change!r}; give --pairs, --texts, --base "
                "or --work"
            )

    def of_stage(stage: str, kind: Any) -> Any:
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in tables[stage].items()
            if name not in _OF_THE_VERB
        }
        check_names(f"{config}: [{stage}]", settings, kind)
        return kind(**settings)

    return of_stage("train-landmarks", LandmarkConfig), of_stage("train", TrainConfig)


def train_stages(
    base: str,
    work: Path,
    landmarks: LandmarkConfig,
    pairs: TrainConfig,
    *,
    minutes: float,
    deliver: Path | None,
    say: Callable[[str], object],
    progress: ProgressListener,
) -> dict[str, Any]:
    """Run what is left of both stages, and return their reports."""
    from cairn.pipeline.lab.train.contrastive import train  # imports torch
    from cairn.pipeline.lab.train.landmark_distillation import train_landmarks

    limits: dict[str, Any] = {"deadline": time.monotonic() + 60 * minutes, "progress": progress}
    prepared, first, second = work / "pairs.parquet", work / "landmarks", work / "run"
    texts = [path for path in (work / "texts.parquet", prepared) if path.is_file()]

    try:
        before = train_landmarks(base, texts, first, landmarks, **limits)
        taught = next(first / name for name in DELIVERED if (first / name).is_dir())
        after = train([prepared], second, pairs, base=str(taught), say=say, **limits)
    finally:
        if deliver is not None:
            for run, target in ((first, deliver / "landmarks"), (second, deliver)):
                _deliver(run, target)
    return {"landmarks": before.to_dict(), **after.to_dict()}


def _deliver(run: Path, target: Path) -> None:
    """Copy the models and the log of a run, if any; each model is whole or the one before."""
    if not (run / "log.jsonl").is_file():
        return
    with durable.storage_errors(f"copying the models to {target}"):
        target.mkdir(parents=True, exist_ok=True)
        for name in DELIVERED:
            if (run / name).is_dir():
                with durable.replacing_folder(target / name) as temporary:
                    shutil.copytree(run / name, temporary, dirs_exist_ok=True)
        shutil.copyfile(run / "log.jsonl", target / "log.jsonl")


def main(config: Path, arguments: Sequence[str] | None = None) -> int:
    """Prepare, train and deliver, by the settings of ``config`` where --config names no others.

    Returns the exit code, 75 where time was up before the last step.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cairn.jobs.train_default", description="Train landmarks, then contrast on pairs."
    )
    add = parser.add_argument
    add("--pairs", type=Path, action="append", default=[], help="pairs to train on; repeat")
    add("--texts", type=Path, action="append", default=[], help="texts for the landmarks alone; repeat")
    add("--judged", type=Path, action="append", default=[], help="judged set to keep out; repeat")
    add("--work", type=Path, required=True, help="folder of what is prepared and of the runs")
    add("--deliver", type=Path, help="folder that models and logs are copied to")
    add("--minutes", type=float, default=38.0, help="stop training after so many")
    add("--base", default=BASE_MODEL, help="model to start from")
    add("--config", type=Path, default=config, help="the settings of both stages")
    add("--set", action="append", default=[], metavar="STAGE.NAME=VALUE", help="change a setting")
    add("--prepare-only", action="store_true", help="write pairs and texts, and end")
    given = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    progress = ProgressLog(say)
    try:
        prepared, texts = given.work / "pairs.parquet", given.work / "texts.parquet"
        if given.texts and not texts.is_file():
            prepare_texts(given.texts, given.judged, texts)
        if given.pairs and not prepared.is_file():
            number = prepare_pairs(given.pairs, given.judged, prepared, progress)
            say(f"prepared={number} bytes={prepared.stat().st_size}")
        if not prepared.is_file():
            raise ConfigError(f"{given.work} must hold pairs.parquet, got none; give --pairs")
        if given.prepare_only:
            return 0
        stages = settings_of(given.config, given.set)
        report = train_stages(
            given.base,
            given.work,
            *stages,
            minutes=given.minutes,
            deliver=given.deliver,
            say=say,
            progress=progress,
        )
    except CairnError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0
