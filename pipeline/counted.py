"""A number with its noun, as sentences and tables have it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Write 1 and ``chunk`` as ``1 chunk``, 1234 and ``chunk`` as ``1,234 chunks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
