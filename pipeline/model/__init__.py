"""Transformers and the layouts they read.

    embedded_weights ─┐
    checkpoint ───────┴▶ backbone (transformer) ─▶ hidden states ─▶ pooling ─▶ chunk embeddings
                                                 ▲                              │
    landmarks: texts ─▶ chunks ─▶ rows ──────────┤                     document_encoder (M2)
    context_encoder (M1): C raw embeddings ──────┘

One engine, ``transformer``, runs every family; ``bert``, ``modernbert``, ``nomic_bert``, ``gte`` and
``decoder`` only read published configurations and weights into it. Its parts: ``weights``, ``feed_forward``,
``rotary``, and a ``pattern`` of who sees whom: ``rectangle`` or ``packed``, over ``attention`` and
``block_local_attention``. ``landmark_windows`` is a pattern of rows that see one another's landmarks, read by
``landmark_reader`` through ``landmark_attention``. ``cde`` ties two of them into CDE's stages. ``matryoshka``
takes a model's first layers and a vector's first dimensions. ``static_embeddings`` is the cheap surrogate
that clustering uses. Import from the modules; this package imports nothing by itself.
"""
