"""Model folders: what a name means, and how weights, tokenizer and settings are read from disk and saved.

    names ─▶ checkpoint ─▶ sentence_transformers_folder, model_defaults
                           encoder_folder (saving)

``model_types`` is the table of families, ``own_tensors`` the names of tensors beside a transformer's,
``first_layers`` a checkpoint cut to its first layers or taken apart into two stages. Nothing is
downloaded and nothing is unpickled. Import from the modules; this package imports nothing by itself.
"""
