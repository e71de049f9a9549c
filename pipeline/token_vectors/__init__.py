"""Token vectors as arrays and files: what training, encoder, index and search share of late interaction.

    projection ─▶ codes ─────▶ max_sim
    states to     few bits     query against
    few dims      a dim        windows

NumPy only. ``pipeline/encode`` makes the codes, ``pipeline/index`` stores them, ``pipeline/search`` ranks.
"""
