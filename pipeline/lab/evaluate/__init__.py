"""Measured quality: systems scored against judged queries, on one base model and one corpus at a time.

    folder ─▶ retrieval set     corpus, queries, judgements
           ─▶ encoded           once per encoding: chunk and document vectors, queries
           ─▶ ranked            by every system on it: exact search, BM25, fusion, as a search would rank
           ─▶ measures a query  nDCG, recall, evidence
           ─▶ table             averages, paired tests, advice

Everything is searched exactly, so that a quantised index never blurs what an encoder gives. A system is a
record (``systems``): a new encoder is a new record, not new code.
"""
