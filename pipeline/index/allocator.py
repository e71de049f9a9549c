"""Give freed memory back: while a collection is written, and after heavy answers.

glibc raises its threshold for returning memory each time a large block is freed, and Lance's threads then
keep hundreds of megabytes unused: writing 100,000 documents of 1 kB peaked at 885 MB, and at 501 MB
with the threshold held. Held only while writing: during encoding it would cost page faults on every tensor.

Nothing happens where the C library is not glibc.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator

import pyarrow as pa

M_MMAP_THRESHOLD = -3
HELD_THRESHOLD_BYTES = 1 << 20
USUAL_THRESHOLD_BYTES = 32 << 20
"""Where glibc's own adjustment ends up in a process that frees large blocks.

It cannot be switched on again once it was set.
"""


def return_freed_memory() -> None:
    """Return what is free to the system, Arrow's own memory as well."""
    pa.default_memory_pool().release_unused()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextlib.contextmanager
def returning_freed_memory() -> Generator[None]:
    """Hold the threshold inside the block; at its end, return what is free and go back to the usual one."""
    hold = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    hold(M_MMAP_THRESHOLD, HELD_THRESHOLD_BYTES)
    return_freed_memory()
    try:
        yield
    finally:
        return_freed_memory()
        hold(M_MMAP_THRESHOLD, USUAL_THRESHOLD_BYTES)
