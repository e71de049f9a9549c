"""The verbs of the laboratory: training, compression, evaluation, analysis and tuning."""
