"""The second stage at work.

    staged rows ─▶ DocumentEncoder ─▶ documents + chunks ─▶ shards ─▶ (index)
    query text  ─▶ TextEncoder ─▶ vectors, same fingerprint

Import from the modules: ``documents`` (encoder), ``encoder_fit`` (settings a model has
room for), ``text_encoder`` (texts in, vectors out), ``prefixes`` (instructions before a text), ``sentences``
and ``structure`` (where they begin), ``shards`` (encoded Parquet pairs; it needs no model).
"""
