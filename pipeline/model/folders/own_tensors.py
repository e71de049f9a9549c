"""The names of tensors beside a transformer's: a latent attention, a null token, a mixer, a first stage."""

from __future__ import annotations

from typing import Final

LATENT_ATTENTION: Final = "latent_attention_model."
"""NV-Embed's published name, wherever in the file it stands."""

NULL_CONTEXT: Final = "context.null_token"
"""The input vector that stands before a text without a context, and for a context vector that was dropped."""

LANDMARK_MIXER: Final = "landmark_mixer."
FIRST_STAGE: Final = "first_stage."
"""A first stage of its own: what follows is the published name of a tensor of the transformer."""

OWN_PREFIXES: Final = (LATENT_ATTENTION, "context.", LANDMARK_MIXER, FIRST_STAGE)
"""Where the names of tensors begin that are not the transformer's."""
