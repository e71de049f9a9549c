"""The verbs of the laboratory: training, compression and evaluation."""
