"""Readers of published models: each turns one configuration and its tensors into layers of the engine.

    readers: from a model type to its reader, by the table in ``folders/model_types``
    rope_settings: the rotary settings of several families
    cde, cde_checkpoint: the two stages of a CDE checkpoint
    others: a family each

Import from the modules; this package imports nothing by itself.
"""
