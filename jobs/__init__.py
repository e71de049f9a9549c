"""Jobs: the line run from end to end, in this process or on a cluster.

    stage ──▶ view ─────────▶ encode ────────▶ commit ──▶ publish      build_index, and recontextualise
    ├─────────────────────┤ cluster_corpus
    ├────────────────────────────────────────┤ encode_corpus
                                             ├──────────────────┤      write_index

``engine`` says what the line asks of a model; ``local_engine`` and ``ray_cluster`` answer. ``schedule``
starts commands by the clock, ``configs`` has a file for each job. Only this package knows how work is spread
over processes and machines; the stages it calls are in ``pipeline``.

Import from the modules: ``build_index``, ``recontextualise``, ``plan_index``, ``train_encoder``,
``compress_model``, ``distill_encoder``.
"""
