"""The map of a collection, as the page and the HTTP API show it.

    document vectors ─▶ corpus_map ─▶ map_routes ─▶ GET /v1/collections/{name}/map
                        t-SNE, once   map_schemas
                        a generation

``cluster_names`` names the clusters, ``map_cache`` keeps maps in memory, ``map_files`` keeps them over a
restart. The health of a collection is answered here too.
"""
