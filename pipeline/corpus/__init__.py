"""Stage 1: from the user's Parquet to checked, deduplicated, staged shards.

    sources ─▶ scan (footers, one schema) ─▶ decode ─▶ checks ─▶ ledger ─▶ staged shards
                     │ refuses drift            │         │         │
                     ▼                          └─────────┴────┬────┘
              one clear error                       quarantine, with a reason

Memory is bounded everywhere by ``CorpusConfig.batch_bytes``, not by files, row groups or rows.
"""
