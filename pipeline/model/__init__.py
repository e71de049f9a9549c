"""Transformers and the layouts they read.

    embedded_weights ─┐
    checkpoint ───────┴▶ backbone (bert) ──▶ hidden states ──▶ pooling ──▶ chunk embeddings
    attention_temperature ┘                      ▲                              │
    landmarks: texts ─▶ chunks ─▶ rows ──────────┤                     document_encoder (M2)
    context_encoder (M1): C raw embeddings ──────┘

Families: ``bert``, ``modernbert``, ``nomic_bert``; the last two share ``weights``, ``rotary``, ``attention`` and ``gated_mlp``.
``matryoshka`` takes a model's first layers and a vector's first dimensions.
``static_embeddings`` is the cheap surrogate that clustering uses. Import from the modules; this package imports nothing by itself.
"""
