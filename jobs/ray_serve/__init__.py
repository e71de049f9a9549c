"""The search API over processes of a Ray cluster: `cairn serve --engine ray`.

    client ─▶ ingress, `cairn serve` itself ─▶ shard 0, replicas     processes of a Ray cluster
              encode, rank, filters, texts  ─▶ shard 1, replicas
                                               vectors, words, token vectors
    client ─▶ Serve's proxy ─▶ ingresses of Ray Serve ─▶ the same, for --replicas 2 and more

An ingress is the application of ``cairn.pipeline.serve`` with a reader that asks shards. ``shard_calls`` has
what runs in a shard's process, asks such processes and replaces them, those on the same machine over a
``direct_line``. ``ingress`` is the deployment of Ray Serve, and ``run`` starts and stops
everything. Ray is imported when it is connected, and nowhere before.
"""
