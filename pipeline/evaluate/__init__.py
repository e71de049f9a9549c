"""Measured quality: systems scored against judged queries, on one base model and one corpus at a time.

    folder ─▶ retrieval set ─▶ encoded once per encoding ─▶ ranked by every system on it ─▶ measures a query ─▶ table
              corpus, queries,  chunk and document vectors    exact search, BM25, fusion      nDCG, recall,      averages, paired
              judgements        of corpus and queries         as a search would rank          evidence           tests, advice

Everything is searched exactly, so that a quantised index never blurs what an encoder gives. A system is a
record (``systems``): a new encoder is a new record, not new code.
"""
