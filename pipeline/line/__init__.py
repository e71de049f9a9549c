"""The line: sources in, one published generation out.

    ingest ─▶ view ─────────────▶ encode ─────────▶ publish
    checked   clusters and        shard by shard    the one writer of the tables,
    rows      context, drawn once                   vector files, then CURRENT

``build_index`` runs it, and ``recontextualise`` with new clusters and a new context. ``engine`` says what the
line asks of a model; ``encoder_worker`` answers in this process, ``cairn.jobs.ray_cluster`` on a cluster.
``pending`` keeps the work that is not published yet.
"""
