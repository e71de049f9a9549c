"""The laboratory: train, compress, evaluate, analyse and tune. Nothing of the product imports it."""
