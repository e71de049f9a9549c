"""Cairn on a Ray cluster: an engine whose workers are actors, and jobs submitted to a cluster.

    engine ─▶ pool ─▶ encoder workers      a corpus encoded by the workers of a cluster
      │  ▲    deadlines, and what follows when a worker dies
      │ tasks ─▶ task workers              the commit's work, by workers without a model
      ▼
    runtime ─▶ a running cluster, or a Ray started here
    submission ─▶ the cluster's Jobs API   `cairn submit`

Import from the modules: ``engine`` (``RayEngine``), ``submission`` (``JobServer``). Ray itself is imported
when a connection is opened, and nowhere before.
"""
