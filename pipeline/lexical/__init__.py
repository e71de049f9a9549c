"""Words of texts in every language, and BM25 of what holds them.

    text ─▶ languages ─▶ tokenizer ─▶ terms ─▶ bm25 ─▶ scores
            which one    runs, pieces          by postings

Knows no files: ``pipeline/index/words`` writes the terms of a segment, and ``pipeline/index/segments`` reads
them.
"""
