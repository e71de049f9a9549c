"""The search API over processes of a Ray cluster: `cairn serve --engine ray`.

    client ─▶ ingress, `cairn serve` itself ─▶ shard 0, replicas     processes of a Ray cluster
              encode, rank                  ─▶ shard 1, replicas
                                               vectors, words, token vectors, filters, texts
    client ─▶ Serve's proxy ─▶ ingresses of Ray Serve ─▶ the same, for --replicas 2 and more

An ingress is the application of ``cairn.pipeline.serve`` over generations that shards hold. ``shard_calls``
has what runs in a shard's process, asks such processes and replaces them, those on the same machine over a
``direct_line``. ``ingress`` is the deployment of Ray Serve, and ``run`` starts and stops everything. Ray is
imported when it is connected, and nowhere before.
"""
