"""Second-stage vectors of a context's documents: the sample that whitening takes its axes from."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.texts import first_tokens
from cairn.pipeline.model.engine.backbone import Backbone


def with_vectors(
    context: ContextSet, documents: pa.Table, config: EncoderConfig, backbone: Backbone
) -> ContextSet:
    """Return the context with one vector for each of its documents; as it is where nothing is whitened.

    ``documents`` has ``doc_id``, ``text`` and ``title`` of at least these. A document's vector is that of its
    first chunk, encoded as a document by itself, with its title and behind the context where the settings ask
    for it.
    """
    if not config.whitening:
        return context
    place = {doc_id: row for row, doc_id in enumerate(documents.column("doc_id").to_pylist())}
    own = documents.take(pa.array([place[doc_id] for doc_id in context.doc_ids]))
    encoder = DocumentEncoder(replace(config, whitening=0.0), context, backbone)
    heads = first_tokens(backbone.tokenizer, own.column("text").to_pylist(), config.longest_chunk_tokens)
    encoded = encoder.encode(heads, titles=own.column("title").to_pylist())
    return replace(context, vectors_CV=encoded.document_vectors_NV)
