"""Token vectors as arrays and files: what training, encoder, index and search share of late interaction.

    codebook, or a trained projection ─▶ max_sim
    states to a few bytes                query against windows

NumPy only. ``pipeline/encode`` makes the codes, ``pipeline/index`` stores them, ``pipeline/search`` ranks.
"""
