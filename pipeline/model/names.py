"""From what a user calls a model to the folder it lies in, before anything heavy is imported.

A model is the embedded one or a folder. Nothing is downloaded.
"""

from __future__ import annotations

import errno
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.model.embedded_weights import MODEL_NAMES, embedded_folder


def model_folder(model: str) -> Path:
    """Return the folder of a model; a name that is neither embedded nor a folder raises :class:`ConfigError` saying how to get it."""
    if model in MODEL_NAMES:
        return embedded_folder()
    folder = Path(model).expanduser()
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        is_folder = False
    if is_folder:
        return folder
    raise ConfigError(
        f"model must be all-MiniLM-L6-v2 or a folder that holds config.json, model.safetensors and tokenizer.json, got {model!r}; "
        "models are not downloaded here: fetch it with `hf download NAME --local-dir FOLDER` and give that folder"
    )
