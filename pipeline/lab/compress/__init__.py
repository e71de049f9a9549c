"""`cairn compress`: a smaller model from a trained one, without labels.

    calibration texts ─▶ rows ─▶ importance of layers ─▶ pruned checkpoint
                          └────▶ second moments of every product's input ─▶ quantised matrices

Source: the steps of NV-Embed, appendix A. `cairn distill` recovers quality afterwards.
"""
