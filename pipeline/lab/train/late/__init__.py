"""Training of a token projection on frozen token states.

pairs ─▶ batches of neighbours ─▶ states, embedded once ─▶ steps ─▶ the best step ─▶ cairn_late.safetensors
"""
