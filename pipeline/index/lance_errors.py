"""What Lance and LanceDB raise, turned into one sentence without paths."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from typing import Final

from cairn.pipeline.durable import raise_storage_error
from cairn.pipeline.errors import CairnError, DamageError, StorageError, is_panic

LANCE_ERRORS: Final = (OSError, RuntimeError, ValueError)
"""What Lance and LanceDB raise: they have no exceptions of their own that can be relied on."""


@contextlib.contextmanager
def lance_errors(action: str, *, damaged: bool = False) -> Generator[None]:
    """Report what Lance raises in the block as a :class:`CairnError`.

    ``damaged`` says that stored files, not the disk, are to blame.
    """
    try:
        yield
    except LANCE_ERRORS as error:
        if isinstance(error, CairnError):
            raise
        code = re.search(r"os error (\d+)", str(error))
        if code is not None:
            raise_storage_error(OSError(int(code.group(1)), os.strerror(int(code.group(1)))), action)
        if damaged:
            raise DamageError(f"{action} failed: the stored files do not fit together") from error
        raise StorageError(f"{action} failed inside LanceDB: {_first_line(error)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DamageError(f"{action} failed: LanceDB gave up on what is stored", verb="verify") from error


def _first_line(error: Exception) -> str:
    return re.sub(r"/\S+", "…", str(error).splitlines()[0] if str(error) else type(error).__name__)[:200]
