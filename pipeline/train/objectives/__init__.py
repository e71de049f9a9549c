"""What training minimises: one module an objective.

contrastive   InfoNCE in tiles without false negatives (CDE eq. 4)
distillation  Matryoshka over widths and layers, closeness to a teacher
"""
