"""The search API on Ray Serve: `cairn serve --engine ray`.

    client ─▶ Serve's proxy ─▶ Ingress, replicas ─▶ shard 0, replicas     processes of a Ray cluster
                               encode, rank,  ─▶ shard 1, replicas
                               filters, texts     vectors, words, token vectors

An ingress is the application of ``pipeline.serve`` with a reader that asks shards. ``shard_actor`` is what
runs in a shard's process, ``shard_calls`` asks such processes and replaces them, ``ingress`` is the
deployment, and ``run`` starts and stops everything. Ray is imported when it is connected, and nowhere before.
"""
