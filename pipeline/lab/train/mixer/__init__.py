"""Train a landmark mixer on vectors that are computed once.

sources ─▶ vectors ─▶ batches ─▶ losses ─▶ trainer ─▶ folder
                                           heldout, rotation, settings
"""
