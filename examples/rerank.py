"""Compare a search with the same search judged again by a cross-encoder.

pip install '.[cpu,rerank]'
python examples/rerank.py handbook "how do I reset a password" BAAI/bge-reranker-base
"""

from __future__ import annotations

import sys

import cairn
from cairn.pipeline.types import Reranker


def places(
    collection: cairn.Collection, question: str, model: str | Reranker
) -> list[tuple[str, int | None]]:
    """Return the documents of the second ranking, each with its place in the first, where it had one."""
    first = [hit.doc_id for hit in collection.search(question).hits]
    second = [hit.doc_id for hit in collection.search(question, rerank=model).hits]
    return [(doc_id, first.index(doc_id) + 1 if doc_id in first else None) for doc_id in second]


if __name__ == "__main__":
    name, question, model = sys.argv[1:4]
    found = places(cairn.open_collection(name), question, model)
    for place, (doc_id, before) in enumerate(found, start=1):
        print(f"{place:3} (was {before or 'not there'})  {doc_id}")
