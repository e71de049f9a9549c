"""A client of the search API, with the methods of a collection in Python that HTTP has too.

    CairnClient ──▶ collection("handbook") ──▶ search, search_pages, read_document, encode_queries
      retries, timeouts, key                   the records that Python's own search returns

``AsyncCairnClient`` is the same with ``await``. Both are in :mod:`cairn.pipeline.client.clients`, which needs
the extra ``client``; their errors are in :mod:`cairn.pipeline.client.errors`. Nothing here loads a model or
opens a collection.
"""
