"""The second stage at work.

    staged rows ─▶ DocumentEncoder ─▶ documents + chunks ─▶ shards ─▶ (index)
    query text  ─▶ TextQueryEncoder ─▶ vectors, same fingerprint

Import from the modules: ``documents`` (encoder), ``shard_tables``, ``queries``, ``prefixes`` (instructions
before a text), ``sentences`` (where they begin), ``shards`` (encoded Parquet pairs; it needs no model).
"""
