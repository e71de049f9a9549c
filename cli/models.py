"""`cairn models [get ORG/NAME]`: which encoders are here, and which public ones can be."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from cairn.cli.settings import json_option
from cairn.cli.terminal import size, table
from cairn.pipeline.config import DEFAULT_MODEL
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.folders.embedded_weights import MODEL_NAMES
from cairn.pipeline.model.folders.names import hub_revision, model_folder
from cairn.pipeline.model.folders.public_models import PUBLIC_MODELS, PublicModel

_INSTALLED = (
    PublicModel(DEFAULT_MODEL, 23, 384, "English, mixes the context in, token vectors; the default"),
    *(PublicModel(name, 23, 384, "English") for name in sorted(MODEL_NAMES)),
)


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(ctx: click.Context, *, as_json: bool) -> None:
    """List encoders: those on this machine, and public ones of families that Cairn reads.

    Other models of these families work, too. `cairn models get` fetches one; nothing is fetched unasked.
    """
    # What cairn.toml says for every verb is meant for the verbs below as well.
    ctx.default_map = {name: dict(ctx.default_map or {}) for name in models.commands}
    if ctx.invoked_subcommand is not None:
        return
    rows = [{**asdict(each), "here": "installed"} for each in _INSTALLED]
    rows += [{**asdict(each), "here": _revision(each.name)} for each in PUBLIC_MODELS]
    heading = ("model", "million parameters", "width", "brings", "here")
    lines = [heading, *(tuple(str(value or "no") for value in row.values()) for row in rows)]
    click.echo(json.dumps(rows) if as_json else table(lines))


def _revision(name: str) -> str | None:
    """Return the revision of a model in the Hugging Face cache, None where it is not there."""
    try:
        return hub_revision(model_folder(name))
    except ConfigError:
        return None


@models.command()
@click.argument("name", metavar="ORG/NAME")
def get(*, name: str) -> None:
    """Fetch a model from the Hugging Face hub into its cache: settings, tokenizer and safetensors alone.

    Files that are here are not fetched again. HF_ENDPOINT names another hub, HF_TOKEN your token.
    """
    from cairn.pipeline.model.folders.download import download_model

    found = download_model(name)
    click.echo(f"{found.name}: revision {found.revision}, {size(found.size_bytes)} in {found.folder}")
    if found.tokenizer_of is not None:
        click.echo(f"its tokenizer is that of {found.tokenizer_of}")
