"""Settings of a collection chosen by what they measure on a share of its own corpus: `cairn tune`.

collection ─▶ sample     drawn documents with judged queries, or known items
           ─▶ temperature  τ of documents and of queries, chosen on half of the queries, tested on the other
           ─▶ funnel       first dimensions first, all of them for what is left: recall, time and bytes
"""
