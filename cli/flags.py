"""Errors in the words of the terminal: settings that a sentence calls by their fields' names become the flags that were typed.

The line below knows fields (``encoder.truncate_dim``), not flags (``--dims``); who calls it from Python reads
the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import click

from cli.settings import FLAG_OF

FIELD_OF: Final[Mapping[str, str]] = {flag: name for name, flag in FLAG_OF.items()}
"""Parameters whose field has another name."""

_STAGE: Final = r"(?:corpus|cluster|context|encoder|index)\."
_WORD: Final = r"(?<![\w/'\"`.=-]){}(?![\w/'\"`=-])"


def in_flags(sentence: str, command: click.Command | None) -> str:
    """Return the sentence with the command's flags in the place of its settings' names.

    Quoted values and paths stay as they are.
    """
    for option in command.params if command else ():
        if not isinstance(option, click.Option):
            continue
        name, field = option.name, FIELD_OF.get(option.name, option.name)
        written = [
            rf"{name} \({field}\)",
            f"{_STAGE}{field}",
            *(each for each in (field, name) if "_" in each),
        ]
        sentence = re.sub(_WORD.format(f"(?:{'|'.join(written)})"), option.opts[0], sentence)
        # A plain word such as "temperature" is a setting only where a sentence is about it.
        sentence = re.sub(rf"^{name}(?= must )", option.opts[0], sentence)
    return sentence
