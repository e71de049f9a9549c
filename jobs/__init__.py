"""Jobs: what needs Ray or a clock, and one entry point a job, ``python -m cairn.jobs.NAME --config FILE``.

``cluster_corpus``, ``encode_corpus`` and ``write_index`` are parts of ``build_index``, which is
``cairn.pipeline.line.build_index``. ``ray_cluster`` encodes on the machines of a cluster, ``ray_serve``
answers there, ``schedule`` starts commands by the clock. ``configs`` has a file for each job.
"""
