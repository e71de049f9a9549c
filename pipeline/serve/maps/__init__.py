"""The map of a collection: where documents stand on it, what its clusters are called, and what is kept of it.

corpus_map lays documents out; cluster_names names clusters; map_cache draws each map once; map_files keeps
maps over a restart; map_routes and map_schemas are its HTTP addresses.
"""
