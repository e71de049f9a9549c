"""The first stage that a folder of ours may hold beside the second, as a model of its own (CDE §4.2).

    first_stage.<published name>        a layer, or an embedding, of the first stage

They lie in ``cairn_extra.safetensors``. The first stage has as many layers as there are here, and the second
stage's configuration and tokenizer; what lies outside layers and is not here, such as frozen embeddings, is
the second stage's. CDE's own folders hold both stages otherwise: see ``families/cde_checkpoint.py``.
"""

from __future__ import annotations

from dataclasses import replace

from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import layer_of, of_so_many_layers
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE


def split_stages(checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the second stage and the first; None where the model embeds its context itself.

    The second stage keeps the fingerprint of both. Raises :class:`ModelError` for a first stage without
    layers.
    """
    own = {
        name.removeprefix(FIRST_STAGE): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(FIRST_STAGE)
    }
    if not own:
        return checkpoint, None
    num_layers = 1 + max(map(layer_of, own))
    if not num_layers:
        raise ModelError(
            f"{FIRST_STAGE}* of the model must hold at least one layer, got none; train the model again"
        )
    tensors = {name: each for name, each in checkpoint.tensors.items() if not name.startswith(FIRST_STAGE)}
    shared = {name: tensor for name, tensor in tensors.items() if layer_of(name) < 0}
    first = replace(
        checkpoint,
        config=of_so_many_layers(checkpoint.config, num_layers),
        tensors={**shared, **own},
        steps=(),
        fingerprint=fingerprint(kind="first-stage", checkpoint=checkpoint.fingerprint),
    )
    return replace(checkpoint, tensors=tensors), first
