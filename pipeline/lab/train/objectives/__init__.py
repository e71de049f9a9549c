"""What training minimises: one module an objective.

contrastive   InfoNCE in tiles without false negatives (CDE eq. 4)
distillation  vectors and rankings near a teacher's
matryoshka    one loss at several widths and layers
"""
