"""Train the default encoder from pairs to model in one command: `python -m cairn.jobs.train_default --help`.

    pairs ─▶ without judged texts ─▶ WORK/pairs.parquet ─▶ steps, for so many minutes ─▶ WORK/run ─▶ --deliver

WORK/pairs.parquet is one file without any text of the judged sets: with --prepare-only it is made where the
data lies and then sent to the machine with the GPU. A run that is killed, or stopped by --minutes, goes on
from its newest checkpoint when the same command runs again, also from a copy of WORK on another machine.
Settings are those of jobs/configs/train_default.toml; --set changes one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.errors import CairnError, ConfigError
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.line.progress_log import ProgressLog
from cairn.pipeline.options import check_names
from cairn.pipeline.settings_file import read_settings_file
from cairn.pipeline.types import ProgressListener

CONFIG: Final = Path(__file__).parent / "configs" / "train_default.toml"
DELIVERED: Final = ("best", "model")


def prepare(pairs: Sequence[Path], judged: Sequence[Path], target: Path, progress: ProgressListener) -> int:
    """Write the pairs that are none of the judged sets' as one Parquet file; return their number."""
    from cairn.pipeline.lab.train.leakage import without_judged
    from cairn.pipeline.lab.train.pairs import read_pairs

    kept = without_judged(read_pairs(pairs), judged, progress)
    table = pa.table(
        {
            "query": kept.queries,
            "document": kept.documents,
            "title": kept.titles,
            "source": kept.sources,
            "instruction": kept.instructions,
            "negatives": pa.array(list(map(list, kept.negatives)), pa.list_(pa.string())),
        }
    )
    with durable.storage_errors(f"writing {target.name}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(target) as temporary:
            pq.write_table(table, temporary, compression="zstd", compression_level=12)
    return len(kept)


def settings_of(config: Path, base: str | None, changes: Sequence[str]) -> tuple[str, TrainConfig]:
    """Return the model to start from and the settings of the training: a file's, with changes."""
    settings = dict(read_settings_file(config).tables.get("train", {}))
    for change in changes:
        name, _, value = change.partition("=")
        try:
            settings[name.replace("-", "_")] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--set must be NAME=VALUE with a value as in TOML, got {change!r}") from error
    own = {name: settings.pop(name, None) for name in ("base", "sources", "output")}
    check_names(f"{config}: [train]", settings, TrainConfig)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return base or own["base"] or BASE_MODEL, TrainConfig(**fields)


def deliver(run: Path, target: Path) -> None:
    """Copy the models and the log of a run; each model is whole or the one before."""
    with durable.storage_errors(f"copying the models to {target}"):
        target.mkdir(parents=True, exist_ok=True)
        for name in DELIVERED:
            if (run / name).is_dir():
                with durable.replacing_folder(target / name) as temporary:
                    shutil.copytree(run / name, temporary, dirs_exist_ok=True)
        shutil.copyfile(run / "log.jsonl", target / "log.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, train and deliver; return the exit code, 75 where time was up before the last step."""
    parser = argparse.ArgumentParser(
        prog="python -m cairn.jobs.train_default", description="Train the default encoder."
    )
    parser.add_argument("--pairs", type=Path, action="append", default=[], help="pairs to train on; repeat")
    parser.add_argument(
        "--judged", type=Path, action="append", default=[], help="judged set to keep out; repeat"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the prepared pairs and of the run"
    )
    parser.add_argument("--deliver", type=Path, help="folder that models and log are copied to")
    parser.add_argument("--minutes", type=float, default=38.0, help="stop training after so many")
    parser.add_argument("--base", help="model to start from, if not the file's")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the job's settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
    parser.add_argument("--prepare-only", action="store_true", help="write the pairs and end")
    given = parser.parse_args(arguments)
    progress = ProgressLog(lambda line: sys.stderr.write(f"{line}\n"))
    try:
        prepared = given.work / "pairs.parquet"
        if given.pairs and not prepared.is_file():
            number = prepare(given.pairs, given.judged, prepared, progress)
            sys.stderr.write(f"prepared={number} bytes={prepared.stat().st_size}\n")
        if not prepared.is_file():
            raise ConfigError(f"{given.work} must hold pairs.parquet, got none; give --pairs")
        if given.prepare_only:
            return 0
        base, config = settings_of(given.config, given.base, given.set)
        from cairn.pipeline.lab.train.contrastive import train  # imports torch

        try:
            report = train(
                [prepared],
                given.work / "run",
                config,
                base=base,
                stop_after_seconds=60 * given.minutes,
                progress=progress,
            )
        finally:
            if given.deliver is not None and (given.work / "run" / "log.jsonl").is_file():
                deliver(given.work / "run", given.deliver)
    except CairnError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(report.to_dict())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
