"""Cairn's line, from a corpus to answers.

    corpus ─▶ cluster ─▶ context ─▶ encode ─▶ index ─▶ search

Import from the packages and modules below; the public names are those of the package ``cairn``
(``pipeline/face``).
"""
