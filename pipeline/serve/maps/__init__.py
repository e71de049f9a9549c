"""The map of a collection: its documents in the plane, neighbours beside one another.

    document vectors ─▶ corpus_map ─▶ map_cache ─▶ cairn.pipeline.serve.map_routes
                        t-SNE, once   in memory
                        a generation

``cluster_names`` names the clusters.
"""
