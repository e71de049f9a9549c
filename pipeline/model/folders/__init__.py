"""Model folders: what a name means, and how weights, tokenizer and settings are read from disk and saved.

    names ─▶ embedded_weights | checkpoint ─▶ sentence_transformers_folder, model_defaults
                                              cde_settings        encoder_folder (saving)

``model_types`` is the table of families, ``own_tensors`` the names of tensors beside a transformer's,
``first_layers`` a checkpoint cut to its first layers, ``first_stage`` one of two stages in two. Nothing is
downloaded and nothing is unpickled. Import from the modules; this package imports nothing by itself.
"""
