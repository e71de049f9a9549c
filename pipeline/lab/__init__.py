"""The laboratory: train, compress and evaluate. Nothing of the product imports it."""
