"""A model fetched from the Hugging Face hub into its cache, on request alone, at one commit.

    config.json, tokenizer.json, model*.safetensors, modules.json and the folders of modules; nothing else

Files are fetched by huggingface_hub, which resumes a file when its connection breaks, and hashed when they
are here: one that is not what the hub lists is removed again. ``refs/main`` moves last, so that a name never
means half a model. CDE's repositories hold no tokenizer: that of their backbone is put beside them. Nothing
pickled is fetched. ``HF_ENDPOINT``, ``HF_TOKEN`` and the cache's variables are huggingface_hub's own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError, ModelError, TryAgainError
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import HUB_NAME, cache_folder, model_folder
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.options import shown

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

CDE_TOKENIZERS: Final[Mapping[str, str]] = {
    "nomic-ai/nomic-bert-2048": "google-bert/bert-base-uncased",
    "answerdotai/ModernBERT-base": "answerdotai/ModernBERT-base",
}
"""Whose tokenizer a CDE model has, by the backbone that its config.json names as ``embedder``."""
_TOKENIZER: Final = "tokenizer.json"
_WHOLE: Final = "model.safetensors"
_SETTINGS: Final = re.compile(
    r"[\w-]+\.json|artifact\.metadata|cairn_(late|extra)\.safetensors"
    r"|((query|document)_)?\d+_\w+/((config|tokenizer)\.json|model\.safetensors)"
)
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLED: Final = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloaded:
    """A model that is whole in the cache."""

    name: str
    revision: str
    folder: Path
    size_bytes: int
    tokenizer_of: str | None = None


def download_model(name: str) -> Downloaded:
    """Fetch ``ORG/NAME`` as ``main`` is now; what is in the cache already is only hashed.

    Raises :class:`ConfigError` for a model that is not there, needs a permission, or is pickled,
    :class:`ModelError` for a file that is not what the hub lists, and :class:`TryAgainError` where the hub
    does not answer.
    """
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(f"a model to download must be called ORG/NAME, got {shown(name)}")
    revision, listed = _list(name)
    files = _wanted(name, listed)
    paths = {file: _fetch(name, revision, listed[file]) for file in files}
    folder = paths["config.json"].parent
    base = None
    if _TOKENIZER not in paths:
        try:
            config = read_json(paths["config.json"])
        except ModelError as error:
            raise ConfigError(
                f"config.json of {name} must be a JSON object, got another; choose another model"
            ) from error
        base = _tokenizer_of(name, config)
        its_revision, its_files = _list(base)
        if _TOKENIZER not in its_files:
            raise ConfigError(f"{base} must hold {_TOKENIZER} for {name}, got none; put one into {folder}")
        durable.write_bytes(
            folder / _TOKENIZER, _fetch(base, its_revision, its_files[_TOKENIZER]).read_bytes()
        )
    with durable.storage_errors("recording the model"):
        reference = cache_folder() / f"models--{name.replace('/', '--')}" / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(reference, revision.encode())
    size_bytes = sum(path.stat().st_size for path in paths.values())
    return Downloaded(name=name, revision=revision, folder=folder, size_bytes=size_bytes, tokenizer_of=base)


def download_if_missing(model: str) -> None:
    """Fetch a model that is not on this machine."""
    try:
        model_folder(model)
    except ConfigError:
        download_model(model)


def _list(name: str) -> tuple[str, dict[str, RepoSibling]]:
    """Return the commit of ``main`` and its files."""
    from huggingface_hub import HfApi

    info = _asked(name, lambda: HfApi().model_info(name, revision="main", files_metadata=True))
    return str(info.sha), {file.rfilename: file for file in info.siblings or ()}


def _wanted(name: str, listed: Mapping[str, object]) -> Sequence[str]:
    """Choose the files that a model is made of."""
    weights = [_WHOLE] if _WHOLE in listed else [file for file in listed if _SHARD.fullmatch(file)]
    if not weights:
        pickled = sorted(file for file in listed if _PICKLED.fullmatch(file))
        found = f"only {pickled[0]}, which is pickled" if pickled else "none"
        raise ConfigError(
            f"the weights of {name} must be in safetensors, got {found}; nothing is unpickled here: convert "
            "it, or choose another model"
        )
    if "config.json" not in listed:
        raise ConfigError(f"{name} must hold config.json, got none; choose another model")
    return sorted({*weights, *(file for file in listed if _SETTINGS.fullmatch(file))})


def _tokenizer_of(name: str, config: Mapping[str, Any]) -> str:
    base = CDE_TOKENIZERS.get(str(config.get("embedder"))) if is_cde(config) else None
    if base is None:
        raise ConfigError(f"{name} must hold {_TOKENIZER}, got none; convert it, or choose another model")
    return base


def _fetch(name: str, revision: str, file: RepoSibling) -> Path:
    """Return the path of a file in the cache, once it is what the hub lists."""
    from huggingface_hub import hf_hub_download

    listed = file.blob_id if file.lfs is None else file.lfs.sha256
    if listed is None:
        raise ModelError(
            f"{file.rfilename} of {name} must be listed with its hash, got none from the hub; set "
            "HF_ENDPOINT to a hub that lists hashes"
        )
    there: Any = {"revision": revision, "cache_dir": cache_folder()}
    path = Path(_asked(name, lambda: hf_hub_download(name, file.rfilename, **there)))
    if file.lfs is not None:
        found = durable.sha256_of_file(path)
    else:  # a small file is listed with its hash in git
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
    if listed != found:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{file.rfilename} of {name} must have the hash {listed}, got {found}; it was removed: run the "
            "same command again"
        )
    return path


def _asked(name: str, request: Any) -> Any:
    """Answer with what the hub says, or say in a sentence why it does not."""
    import httpx2
    from huggingface_hub import errors

    try:
        return request()
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} must be open to you, got a refusal; accept its terms on its page, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(f"{name} must be a model on the hub, got none of that name") from error
    except errors.OfflineModeIsEnabled as error:
        raise ConfigError("a download must be allowed, got HF_HUB_OFFLINE=1; unset it") from error
    except (OSError, httpx2.HTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TryAgainError(f"the hub did not send {name}: {reason}; run the same command again") from error
