"""Transformers and the layouts they read.

    checkpoint ─▶ backbone (transformer) ─▶ hidden states ─▶ pooling ─▶ chunk embeddings
                                          ▲                              │
    landmarks: texts ─▶ chunks ─▶ rows ───┤                     document_encoder (M2)
    context_encoder (M1): C raw vectors ──┘

    folders     names, weights, tokenizers and settings on disk; the table of model types
    engine      the transformer layer and what runs it
    families    readers of published configurations and weights
    here        what makes a model an encoder: landmarks, pooling, projection, mixer, context, dimensions

``backbone_loader`` chooses a family's reader by ``model_type``. ``static_embeddings`` is the cheap
surrogate that clustering uses. Import from the modules; this package imports nothing by itself.
"""
