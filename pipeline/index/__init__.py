"""Stage 5: vectors in Arrow become a published generation; readers open one and never see another.

    encoded Parquet ─▶ lance_index ─▶ publish ─▶ generations/<n>/ ─▶ generation ─▶ search
                       the truth      FAISS and    CURRENT moves       opened,
                       (LanceDB)      Arrow files  last, atomically    immutable

``layout`` knows the folders, ``names`` the files. ``exact_index`` says what a vector index answers, and is
the oracle of ``faiss_index``. ``segments`` holds the parts of a generation. ``stored_files`` keeps its files
whole; ``verify``, ``repair``, ``status`` and ``maintenance`` (compact, delete) look after a collection.
``replica`` keeps a copy of one in an object store.
"""
