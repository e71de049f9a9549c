"""Model folders: what a name means, and how weights, tokenizer and settings are read from disk and saved.

    names ─▶ embedded_weights | checkpoint ─▶ sentence_transformers_folder, model_defaults
                                              cde_settings        encoder_folder (saving)

Nothing is downloaded and nothing is unpickled. Import from the modules; this package imports nothing by
itself.
"""
