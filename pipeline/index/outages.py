"""What the log says of object stores that do not answer: once that it begins, and once that it is over."""

from __future__ import annotations

import logging

from cairn.pipeline.errors import CairnError

log = logging.getLogger(__name__)

_out: dict[str, type[CairnError]] = {}
"""What is wrong with each store, by the address of its collection; all readers in a process share it."""


def note_outage(address: str, error: CairnError | None) -> None:
    """Note that reading a collection's store failed, or did not; another kind of error is news, too."""
    before = _out.pop(address, None)
    if error is not None:
        _out[address] = type(error)
        if before is not type(error):
            log.warning("replica.not_refreshed store=%s error=%s", address, error)
    elif before is not None:
        log.warning("replica.refreshed_again store=%s", address)
