"""`cairn sample FOLDER`: a real corpus for the first five minutes, made from Python's own documentation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from cairn.cli.options import COUNT
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, echo, facts
from cairn.pipeline.config import SampleKind
from cairn.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from cairn.pipeline.index.object_folder import ObjectFolder


@click.command(context_settings={"show_default": True})
@click.argument("folder", default="cairn-sample")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(get_args(SampleKind)),
    help="Write only documents of this kind; repeat.  [default: all]",
)
@click.option("--max-documents", type=COUNT, help="Write at most this many documents.  [default: all]")
@json_option
def sample(*, folder: str, kinds: tuple[SampleKind, ...], max_documents: int | None, as_json: bool) -> None:
    """Write a Parquet corpus into FOLDER, or s3://BUCKET/FOLDER.

    Docstrings, help topics and descriptions of what is installed here.
    """
    if "://" in folder:
        store = _store(folder)
        with tempfile.TemporaryDirectory(prefix="cairn-sample-") as local:
            values = _written(Path(local), kinds, max_documents)
            values["files"] = _uploaded(values["files"], store, folder)
    else:
        values = _written(Path(folder), kinds, max_documents)
    echo(json.dumps(values, default=str) if as_json else facts(values))


def _written(folder: Path, kinds: tuple[SampleKind, ...], max_documents: int | None) -> dict[str, Any]:
    from cairn.pipeline.corpus.sample import write_sample

    with ProgressBars() as progress:
        return asdict(write_sample(folder, kinds=kinds, max_documents=max_documents, progress=progress))


def _store(uri: str) -> ObjectFolder:
    from cairn.pipeline.index.names import STORE_URI
    from cairn.pipeline.index.object_folder import ObjectFolder

    if not STORE_URI.fullmatch(uri):
        raise ConfigError(
            f"the sample's destination must be a folder or s3://BUCKET/FOLDER, got {uri!r}; copy it to "
            "other storage"
        )
    return ObjectFolder(uri)


def _uploaded(paths: Sequence[Path], store: ObjectFolder, uri: str) -> tuple[str, ...]:
    for path in paths:
        store.write(path.name, path)
    return tuple(f"{uri.rstrip('/')}/{path.name}" for path in paths)
