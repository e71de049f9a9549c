"""Fine-tune an encoder for landmarks and for the corpus's context.

pairs ─▶ surrogate ─▶ clusters ─▶ batches ─▶ sequences ─▶ M1, M2 ─▶ losses
  ─▶ checkpoints that `ingest --model` reads
                                              of landmarks  GradCache  in tiles
"""
