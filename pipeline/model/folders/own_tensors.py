"""The names of tensors beside a transformer's: latent and landmark attention, a mixer, a first stage."""

from __future__ import annotations

from typing import Final

LATENT_ATTENTION: Final = "latent_attention_model."
"""NV-Embed's published name, wherever in the file it stands."""

LANDMARK_GATES: Final = "landmark_attention.gates"
CONTEXT_GATES: Final = "landmark_attention.context_gates"
CONTEXT_SIZE: Final = "landmark_attention.context_size"
"""How many context vectors the gates were trained for; one number."""

GATE_NAMES: Final = (LANDMARK_GATES, CONTEXT_GATES)
NULL_CONTEXT: Final = "landmark_attention.null_token"
"""What a text without a context sees in the place of every context vector; a model without one sees nothing.

Older releases wrote ``landmark_attention.null_context``, which nothing reads.
"""
LANDMARK_MIXER: Final = "landmark_mixer."
FIRST_STAGE: Final = "first_stage."
"""A first stage of its own: what follows is the published name of a tensor of the transformer."""

OWN_PREFIXES: Final = (LATENT_ATTENTION, "landmark_attention.", LANDMARK_MIXER, FIRST_STAGE)
"""Where the names of tensors begin that are not the transformer's."""
