"""What an encoder is shown of the corpus: J documents over all clusters, embedded once.

Documents and queries are shown the same.

clusters ──▶ places by size ──▶ J documents by hash ──▶ first stage, once ──▶ ContextSet ──▶ every encoding
                                                                                  │
corpus now ──▶ histogram over the same clusters ──▶ Drift: does the context still stand for it?
"""

from cairn.pipeline.context.drift import Drift, measure_drift
from cairn.pipeline.context.sampling import allocate, draw_context
from cairn.pipeline.context.store import ContextSet, build_context

__all__ = ["ContextSet", "Drift", "allocate", "build_context", "draw_context", "measure_drift"]
