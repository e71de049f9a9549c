"""A generation searched by several processes: each has some of its documents, and one asks them all.

    Searcher ─▶ ShardedReader ─▶ ask ─┬─▶ HeldParts ─▶ ShardPart    some documents
                ranks and merges      ├─▶ HeldParts ─▶ ShardPart    others
                                      └─▶ …

Answers are those of one process: every score depends on a row, the query and sums over all shards alone, and
``cairn.pipeline.search.ranking`` ranks what the shards found as it ranks what one process found.

``placement`` says which shard has which documents, ``routes`` which shards a query is for, and
``route_recall`` what that finds. ``messages`` are what is asked; ``held_parts`` answers, and
``sharded_reader`` asks. How a question reaches another process is the caller's business.
"""
