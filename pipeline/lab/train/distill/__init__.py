"""`cairn distill`: a student follows a teacher's hidden states and vectors on plain texts.

texts ─▶ rows ─┬─▶ teacher ─▶ states of some layers, vectors ─┐
└─▶ student ─▶ states of its layers, vectors ──┴─▶ loss ─▶ steps of the one trainer
"""
