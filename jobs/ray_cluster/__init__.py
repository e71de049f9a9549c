"""Cairn on a Ray cluster.

engine      encodes a corpus with the workers of a cluster
pool        workers, their deadlines, and what happens when one dies
runtime     the connection to a cluster; local starts one of our own
submission  jobs submitted to a cluster
"""
