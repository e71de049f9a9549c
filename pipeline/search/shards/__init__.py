"""A generation searched by several processes: each has some of its documents, and one asks them all.

    Searcher ─▶ ShardedReader      ─▶ ask ─┬─▶ HeldParts ─▶ ShardPart    some documents
                ShardedGeneration          ├─▶ HeldParts ─▶ ShardPart    others
                rank and merge             └─▶ …

Answers are those of one process: every score depends on a row, the query and sums over all shards alone, and
``cairn.pipeline.search.ranking`` ranks what the shards found as it ranks what one process found.

``parts`` says what is asked, and answers.
``sharded_generation`` asks for rows by their positions, ``sharded_reader`` for candidates and scores. How a
question reaches another process is the caller's business.
"""
