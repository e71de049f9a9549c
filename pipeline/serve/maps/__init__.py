"""The map of a collection: its documents in the plane, neighbours beside one another.

    document vectors ─▶ corpus_map ─▶ map_cache ─▶ cairn.pipeline.serve.map_routes

``corpus_map`` draws it once a generation, ``map_cache`` keeps it in memory.
"""
