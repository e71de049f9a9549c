"""What the first bytes of a file say that it is, whatever its name says.

One look, which every format takes before it reads: a file of another kind is refused in a sentence that says
what it is and what to do. It deliberately tells no texts apart, but for HTML and XML, which are no table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

HEAD: Final = 512
"""How many first bytes are looked at."""
ZIP: Final = "a zip archive"
OLD_OFFICE: Final = "of an Office before 2007, or encrypted"
PDF: Final = "PDF"
RTF: Final = "RTF"
MARKUP: Final = "HTML or XML"
PARQUET: Final = "Parquet"
ARROW: Final = "Arrow"
TEXT: Final = "a text"
GZIP: Final = "compressed by gzip"
ZSTD: Final = "compressed by zstd"
BZIP2: Final = "compressed by bzip2"
_KINDS: Final[Mapping[str, tuple[bytes, str]]] = {
    ZIP: (rb"PK(?:\x03\x04|\x05\x06)", "unpack it, or name it what it is, such as .docx or .xlsx"),
    OLD_OFFICE: (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "save it as .docx, .pptx or .xlsx"),
    PDF: (rb"%PDF-[0-9]", "name it .pdf"),
    RTF: (rb"\{\\rtf[0-9\\]", "name it .rtf"),
    PARQUET: (rb"PAR1\x15", "name it .parquet"),
    ARROW: (rb"ARROW1\0\0", "name it .arrow"),
    GZIP: (rb"\x1f\x8b\x08", "unpack it"),
    ZSTD: (rb"\x28\xb5\x2f\xfd", "unpack it"),
    BZIP2: (rb"BZh[1-9]1AY&SY", "unpack it"),
    "an xz, 7z, rar or tar archive": (
        rb"\xfd7zXZ\0|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|.{257}ustar[\0 ]", "unpack it"
    ),
    "a picture": (
        rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a[^ -~]|II\*\0|MM\0\*|RIFF.{4}WEBP", "recognise its text first"
    ),
    "a database of SQLite": (rb"SQLite format 3\0", "export its tables, as to CSV"),
    MARKUP: (
        rb"(?:\xef\xbb\xbf)?\s*(?i:<!doctype\s+html|<html[\s>]|<\?xml\s)", "name it .html or what it is"
    ),
}  # fmt: skip
"""What each kind begins with, and what to do with one that has the name of another."""
_TEXT_BYTES: Final = re.compile(rb"[\t\n\r\f\x20-\x7e\x80-\xff]+")


def kind_of(head: bytes) -> str | None:
    """Name the kind of a file by its first bytes, None where they do not tell."""
    return next(
        (kind for kind, (begin, _) in _KINDS.items() if re.match(begin, head[:HEAD], re.DOTALL)), None
    )


def other_kind(head: bytes, name: str, own: Collection[str] = ()) -> str | None:
    """Say that a file is of another kind than its ``name`` says, and what to do; None where nothing tells.

    ``own`` are the kinds that a file of this name may be.
    """
    kind = kind_of(head)
    return None if kind is None or kind in own else f"it is {kind}, and not {name}: {_KINDS[kind][1]}"


def no_kind(head: bytes, name: str, own: Collection[str] = ()) -> str | None:
    """Say what a file is that could not be read as its ``name`` says: of another kind, or a text."""
    told = other_kind(head, name, own)
    is_text = kind_of(head) is None and TEXT not in own and _TEXT_BYTES.fullmatch(head[:HEAD])
    shown = f"not {name}" if name else "its name has no suffix"
    return f"it is {TEXT}, and {shown}: name it .txt, .csv or what it is" if is_text else told
