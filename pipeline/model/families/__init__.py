"""Readers of published models: each turns one configuration and its tensors into layers of the engine.

    bert, modernbert, nomic_bert, gte, decoder (rope_settings reads their rotary settings)
    cde and cde_checkpoint: the two stages of a CDE checkpoint
    m3bert: the architecture of m³BERT
    readers: from a model type to its reader, by the table in ``folders/model_types``

Import from the modules; this package imports nothing by itself.
"""
