"""`cairn models [get ORG/NAME]`: which encoders are here, and which public ones can be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

import click
from cairn.cli.settings import json_option
from cairn.cli.terminal import echo, size, table
from cairn.pipeline.config import DEFAULT_MODEL, LANDMARK_MODEL, NO_MODEL
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.folders.names import MODEL_NAMES, hub_revision, model_folder


@dataclass(frozen=True, slots=True)
class PublicModel:
    """One encoder of the Hugging Face hub; ``width`` is that of its vectors, or vocabulary.

    ``can`` is what it can do or was trained to: ``states`` of tokens, which make token vectors; reading the
    ``context``; ``landmarks``, chunks of one row with a vector each; ``sparse`` weights of words.
    """

    name: str
    million_parameters: int
    width: int
    brings: str
    can: tuple[str, ...] = ("states",)


_CONTEXT: Final = ("states", "context")
_LANDMARKS: Final = ("states", "landmarks")
_SPARSE: Final = ("sparse",)
_TOKENS: Final = f"--token-bytes 24 adds token vectors of {DEFAULT_MODEL}, English"
_LONG: Final = "rows of 8,192 tokens"
_PPLX: Final = "perplexity-ai/pplx-embed-context-v1-0.6b"
_OPENSEARCH: Final = "opensearch-project/opensearch-neural-sparse-encoding"

PUBLIC_MODELS: Final = (
    PublicModel("sentence-transformers/all-MiniLM-L12-v2", 33, 384, "English"),
    PublicModel("sentence-transformers/all-mpnet-base-v2", 109, 768, "English"),
    PublicModel("BAAI/bge-small-en-v1.5", 33, 384, "English"),
    PublicModel("BAAI/bge-base-en-v1.5", 109, 768, "English"),
    PublicModel("intfloat/multilingual-e5-small", 118, 384, "100 languages"),
    PublicModel("nomic-ai/nomic-embed-text-v1.5", 137, 768, f"English, {_LONG}, --dims"),
    PublicModel("Alibaba-NLP/gte-modernbert-base", 149, 768, f"English, {_LONG}"),
    PublicModel("Alibaba-NLP/gte-multilingual-base", 305, 768, f"70 languages, {_LONG}, --dims"),
    PublicModel("google/embeddinggemma-300m", 308, 768, "100 languages, --dims; needs HF_TOKEN"),
    PublicModel("jxm/cde-small-v1", 281, 768, "English", _CONTEXT),
    PublicModel("jxm/cde-small-v2", 306, 768, "English", _CONTEXT),
    PublicModel("Qwen/Qwen3-Embedding-0.6B", 596, 1024, "100 languages, long rows, --dims"),
    PublicModel(_PPLX, 596, 1024, "many languages, rows of a whole document, --dims", _LANDMARKS),
    PublicModel("answerdotai/answerai-colbert-small-v1", 33, 96, "English, late interaction"),
    PublicModel("lightonai/GTE-ModernColBERT-v1", 149, 128, f"English, late interaction, {_LONG}"),
    PublicModel("minishlab/potion-retrieval-32M", 32, 512, "English, a table of token vectors: fast"),
    PublicModel(
        f"{_OPENSEARCH}-doc-v3-distill", 67, 30_522, "English, --sparse-model; runs none for queries", _SPARSE
    ),
    PublicModel("ibm-granite/granite-embedding-30m-sparse", 30, 50_265, "English, --sparse-model", _SPARSE),
    PublicModel("nvidia/NV-Embed-v2", 7850, 4096, "English, latent pooling; not for commercial use"),
)

_OTHERS: Final = (
    PublicModel("another ORG/NAME or folder", 0, 0, "any text encoder; transformers runs other families"),
    PublicModel("https://HOST/v1/embeddings#NAME", 0, 0, f"an endpoint: vectors; {_TOKENS}", ()),
    PublicModel("any of these, --vector-column", 0, 0, f"given vectors, queries by it; {_TOKENS}", ()),
    PublicModel(NO_MODEL, 0, 0, "given vectors (--vector-column); texts are answered by BM25", ()),
)

_INSTALLED = (
    PublicModel(DEFAULT_MODEL, 23, 384, "English; the default", _CONTEXT),
    PublicModel(LANDMARK_MODEL, 23, 384, "English, rows of 512 tokens", _LANDMARKS),
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
    rows += [{**asdict(each), "here": None} for each in _OTHERS]
    heading = ("model", "million parameters", "width", "brings", "can", "here")
    shown = [{**row, "can": ", ".join(row["can"])} for row in rows]
    lines = [heading, *(tuple(str(value or "no") for value in row.values()) for row in shown)]
    echo(json.dumps(rows) if as_json else table(lines))


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
    echo(f"{found.name}: revision {found.revision}, {size(found.size_bytes)} in {found.folder}")
    if found.tokenizer_of is not None:
        echo(f"its tokenizer is that of {found.tokenizer_of}")
