"""Readers of published models: each turns one configuration and its tensors into layers of the engine.

    rope_settings: the rotary settings of several families
    cde: the two stages of a CDE checkpoint
    others: a family each

Import from the modules; this package imports nothing by itself.
"""
