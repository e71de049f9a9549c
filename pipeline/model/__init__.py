"""Transformers and the layouts they read.

    embedded_weights ─┐
    checkpoint ───────┴▶ backbone (bert) ──▶ hidden states ──▶ pooling ──▶ chunk embeddings
    attention_temperature ┘                      ▲                              │
    landmarks: texts ─▶ chunks ─▶ rows ──────────┤                     document_encoder (M2)
    context_encoder (M1): C raw embeddings ──────┘

``static_embeddings`` is the cheap surrogate that clustering uses. Import from the modules; this package imports nothing by itself.
"""
