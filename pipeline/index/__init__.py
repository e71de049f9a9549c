"""Stage 5: vectors in Arrow become a published generation; readers open one and never see another.

    encoded Parquet ─▶ rows ────────▶ publish ─▶ generations/<n>/ ─▶ generation ─▶ search
                       the truth      segments     CURRENT moves       opened,
                       (LanceDB)      of files     last, atomically    immutable

``names`` says what files are called, ``files`` whether they are as recorded, ``layout`` where they lie.
``segments`` holds the parts of a generation: ``columns`` and ``words`` are their Arrow files, and those of
FAISS are ``pipeline/vector_index``'s. ``verify`` finds damage and ``recovery`` mends it. ``maintenance``
compacts and deletes, ``status`` and ``aliases`` tell and switch. ``replica`` keeps a copy of a collection in
an ``object_folder``.
"""
