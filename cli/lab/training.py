"""The verbs that train.

Each calls one function of ``cairn.pipeline.lab.train`` with its options and prints the report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from cairn.cli.options import COUNT, NamedPath, add_options, chosen, given
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, echo, table, thousands, warn
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.settings import (
    DistillConfig,
    ExperimentConfig,
    ExperimentName,
    LandmarkConfig,
    PretrainConfig,
    TrainConfig,
)
from cairn.pipeline.options import options_of

if TYPE_CHECKING:
    from cairn.pipeline.types import ModelScorer, ProgressListener

_PATH, _FOLDER = NamedPath(path_type=Path), NamedPath(path_type=Path, file_okay=False)
_BASE = click.option("--base", default=BASE_MODEL, help="Encoder to start from, by name or folder.")
_OUTPUT = click.option("--output", required=True, type=_FOLDER, help="Folder of the run.")
_JUDGED = click.option(
    *("--judged", "--exclude", "judged"),
    multiple=True,
    type=_PATH,
    help="Evaluation set to keep out of the data; repeat.",
)
_RUN = (
    json_option,
    click.option("--quiet", is_flag=True, help="No progress on stderr."),
    click.option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        help="Stop after so many, at a checkpoint; the same command goes on.  [default: no limit]",
        show_default=False,
    ),
    _OUTPUT,
)


def _trains(kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Add the options of ``kind`` and those of a run; print the report that a function returns.

    It is called with the settings, with how to run (where, until when, who hears of it) and with the options
    of its own.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @wraps(function)
        def verb(*, output: Path, quiet: bool, as_json: bool, minutes: float | None, **options: Any) -> None:
            config = kind(**chosen(click.get_current_context(), kind))
            own = {name: value for name, value in options.items() if name not in options_of(kind)}
            with ProgressBars(quiet=quiet) as progress:
                limits = {
                    "folder": output,
                    "deadline": time.monotonic() + 60 * minutes if minutes else math.inf,
                    "progress": progress,
                }
                said = function(config, limits, **own).to_dict()
            echo(json.dumps(said, default=dict) if as_json else table(_rows(said)))

        decorated: Callable[..., None] = add_options(kind)(verb)
        for add in _RUN:
            decorated = add(decorated)
        return decorated

    return decorate


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "skipped":
            rows += [(f"  skipped: {reason}", thousands(count)) for reason, count in sorted(value.items())]
        elif name == "seconds":
            rows.append(("time", duration(value)))
        elif name.endswith("_seconds"):
            rows.append((f"time to {name.removesuffix('_seconds')}", duration(value)))
        elif value is not None and (name != "best_step" or report["best_score"] is not None):
            rows.append((name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=_PATH)
@_BASE
@click.option(
    "--from-config",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Start from new weights that this config.json describes, with the base's tokenizer.",
)
@_trains(PretrainConfig)
def pretrain(config: PretrainConfig, limits: Mapping[str, Any], **own: Any) -> Any:
    """Pretrain an encoder on SOURCES: tables with text and, optionally, language.

    A killed run continues from its newest checkpoint when the same command runs again. FOLDER/model and
    FOLDER/best are for --model, and for --base of `cairn train`.
    """
    from cairn.pipeline.lab.train.pretrain import pretrain as run

    return run(config=config, **own, **limits)


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, metavar="[SOURCE...]", type=_PATH)
@click.option(
    "--documents", multiple=True, type=_PATH, help="Table of long documents to make pairs of; repeat."
)
@_BASE
@_JUDGED
@click.option("--dev", multiple=True, type=_PATH, help="Judged set that says which step is the best; repeat.")
@click.option("--dev-queries", type=COUNT, default=300, help="Draw at most so many queries of each dev set.")
@click.option(
    "--dev-documents", type=COUNT, default=2000, help="Draw at most so many documents, judged ones first."
)
@_trains(TrainConfig)
def train(
    config: TrainConfig,
    limits: Mapping[str, Any],
    *,
    judged: tuple[Path, ...],
    dev: tuple[Path, ...],
    dev_queries: int,
    dev_documents: int,
    **own: Any,
) -> Any:
    """Fine-tune an encoder on SOURCES, or on --documents (text, title, source).

    SOURCES are tables, such as Parquet or JSON lines, with query, document, title and source.

    A killed run continues from its newest checkpoint when the same command runs again. Use FOLDER/model or
    FOLDER/best as --model. Dev sets (folders as of `cairn evaluate`) are kept out of the data, too.
    """
    from cairn.pipeline.lab.train.contrastive import train as run

    report = run(
        config=config,
        judged=(*judged, *dev),
        scorer=_scorer(dev, dev_queries, dev_documents, config, limits["progress"]),
        say=limits["progress"].say,
        **own,
        **limits,
    )
    if report.best_score is None:
        echo(
            "no pairs were held out, so no step was scored and there is no FOLDER/best; use FOLDER/model, "
            "give more pairs or name sets with --dev",
            err=True,
        )
    elif not report.best_step:
        echo(
            "no step scored above the base, so FOLDER/best is the base; give more pairs, or lower --peak-lr",
            err=True,
        )
    return report


def _scorer(
    folders: tuple[Path, ...], queries: int, documents: int, config: TrainConfig, progress: ProgressListener
) -> ModelScorer | None:
    """Return what scores models on the dev sets, None without any."""
    if folders:
        from cairn.pipeline.lab.evaluate.dev_scores import DevScorer

        return DevScorer.of(
            folders,
            max_queries=queries,
            max_documents=documents,
            seed=config.seed,
            warn=warn,
            precision=config.precision,
            progress=progress,
        )
    for name in ("dev_every", "dev_queries", "dev_documents"):
        if name in given(click.get_current_context()):
            raise ConfigError(f"{name} must go with dev sets, got none; name them with --dev")
    return None


@click.command(context_settings={"show_default": True})
@click.argument("teacher")
@click.argument("student")
@click.option("--texts", multiple=True, required=True, type=_PATH, help="Table with text; repeat.")
@_trains(DistillConfig)
def distill(config: DistillConfig, limits: Mapping[str, Any], *, texts: tuple[Path, ...], **own: Any) -> Any:
    """Train STUDENT to follow TEACHER, both a name or a folder, without queries and labels.

    Of a teacher with the same tokenizer and width, hidden states are followed as well as vectors, so that a
    model gets back what `cairn compress` took. A killed run continues from its newest checkpoint when the
    same command runs again. Use FOLDER/best or FOLDER/model as --model.
    """
    from cairn.pipeline.lab.train.distill import distill as run

    return run(sources=texts, config=config, **own, **limits)


@click.command(context_settings={"show_default": True})
@click.argument("base")
@click.option(
    "--texts",
    multiple=True,
    required=True,
    type=_PATH,
    help="Table with text, or with document; repeat.",
)
@click.option(
    "--student",
    help="Model of the same kind whose weights training begins with.  [default: BASE]",
    show_default=False,
)
@_JUDGED
@_trains(LandmarkConfig)
def train_landmarks(
    config: LandmarkConfig, limits: Mapping[str, Any], *, texts: tuple[Path, ...], **own: Any
) -> Any:
    """Train BASE, a name or a folder, to pool landmarks, from texts alone.

    Each landmark follows what BASE makes of its chunk behind the title. A killed run continues from its
    newest checkpoint when the same command runs again. Use FOLDER/best or FOLDER/model as --model.
    """
    from cairn.pipeline.lab.train.landmark_distillation import train_landmarks as run

    return run(sources=texts, config=config, **own, **limits)


@click.command(context_settings={"show_default": True})
@click.argument("name", type=click.Choice(get_args(ExperimentName)))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=_PATH)
@click.option("--judged", multiple=True, required=True, type=_PATH, help="Judged set to score on; repeat.")
@click.option(
    "--texts", multiple=True, type=_PATH, help="Texts for lmk and distil, some of them long; repeat."
)
@_trains(ExperimentConfig)
def experiment(config: ExperimentConfig, limits: Mapping[str, Any], **own: Any) -> Any:
    """Measure a claim of the papers on SOURCES, pairs as of `cairn train`, and on judged sets.

    Prints nDCG@10 by vectors of every variant and its difference from the first, with 95 % intervals over
    seeds and queries. FOLDER/NAME/results.jsonl has the score of every query. The same command goes on.
    """
    from cairn.pipeline.lab.experiments import run_experiment as run

    return run(config=config, **own, **limits)
