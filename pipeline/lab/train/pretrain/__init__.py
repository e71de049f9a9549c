"""Pretrain an encoder on text: masked language models over layers and widths, and RetroMAE with landmarks.

texts ─▶ tokens ─▶ packed rows ─▶ masked ─▶ encoder ─▶ (decoder) ─▶ loss over the vocabulary in tiles
                  of languages
"""
