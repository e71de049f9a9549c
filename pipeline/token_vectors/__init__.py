"""Token vectors as arrays and files: what training, encoder, index and search share of late interaction.

    codebook, or a trained projection: states to a few bytes, and what a query's tokens weigh

NumPy only. ``pipeline/encode`` makes the codes, ``pipeline/index`` stores them, ``pipeline/search`` ranks.
"""
