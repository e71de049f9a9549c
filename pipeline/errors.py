"""Every error Cairn raises on purpose, and the exit code each one ends a command with.

    CairnError                       1   something failed; nothing published was changed
    ├── UsageError (ValueError)      2   the caller's fault
    │   ├── ConfigError                  a setting has a value it must not have
    │   ├── SourceError                  a source cannot be found, or holds nothing to index
    │   ├── SchemaError                  a column is missing or has the wrong type
    │   ├── FilterError                  a search filter does not follow the grammar
    │   │   └── RestrictionError             the filter a caller is bound to does not fit the collection
    │   ├── CollectionNotFoundError      no such collection
    │   ├── DocumentsRefusedError        documents that cannot be stored, each with its fault
    │   ├── ChangedDocumentError         a document is not as the caller saw it
    │   ├── KeyReusedError               an idempotency key came with another request
    │   └── FingerprintMismatchError     model, context or settings differ from the collection's
    ├── ModelError                   1   weights are missing, damaged or do not fit
    ├── IntegrityError               1   stored files do not match their manifest
    │   ├── DamageError                  what is stored is not what was written; verify or repair it
    │   └── PartitionsMissingError       a search would leave out partitions, and was not asked to
    ├── StorageError                 1   the disk refused a read or a write
    ├── ClusterError                 1   the workers of a Ray cluster cannot do the work
    ├── SchedulerDownError           1   no scheduler runs the schedules of a file
    └── TryAgainError               75   nothing is wrong; the same call may work later
        ├── CollectionBusyError          another writer holds the collection
        ├── WritesWaitingError           as many writes wait as are kept
        ├── SchedulerBusyError           another scheduler holds the schedule file
        ├── ClusterUnreachableError      no Ray cluster answers at the address
        ├── EndpointDownError            an embeddings endpoint does not answer, or takes no request
        └── DiskFullError                no space left on the device

What a server of the search API answers with, and what becomes of a call without an answer, are the errors of
:mod:`cairn.pipeline.client.errors`.

A message reads ``<what> must <contract>, got <value>; <what to do>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import override


class CairnError(Exception):
    """Anything Cairn reports in one sentence instead of a traceback."""

    exit_code = 1

    @property
    def fault(self) -> str:
        """Return what is wrong, without a command to run against it."""
        return str(self)


class UsageError(CairnError, ValueError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting has a value it must not have."""


class SourceError(UsageError):
    """A source cannot be found, cannot be read, or holds nothing to index."""


class SchemaError(UsageError):
    """A column is missing, has the wrong type, or differs from the collection's."""


class FilterError(UsageError):
    """A search filter does not follow the grammar or names an unknown column."""


class RestrictionError(FilterError):
    """The filter that a caller is bound to does not fit the collection: nothing may be answered."""


class CollectionNotFoundError(UsageError):
    """No collection of that name stands under the root."""


class DocumentsRefusedError(UsageError):
    """Documents cannot be stored: ``faults`` are their places and what is wrong with each."""

    def __init__(self, sentence: str, faults: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(sentence)
        self.faults = tuple(faults)


class ChangedDocumentError(UsageError):
    """A document is not the one that the caller saw."""


class CollectionExistsError(UsageError):
    """A collection is to be made that there is already."""


class KeyReusedError(UsageError):
    """An idempotency key came before, with another request."""


class FingerprintMismatchError(UsageError):
    """The model, context or settings in hand are not those the collection was built with."""


class ModelError(CairnError):
    """Model weights are missing, damaged or do not fit their configuration."""


class IntegrityError(CairnError):
    """Stored files do not match their manifest."""


class DamageError(IntegrityError):
    """What is stored is not what was written.

    Code that finds damage often knows a file and not its collection: ``command`` is completed by the first
    caller that knows it.
    """

    def __init__(self, fault: str, *, verb: Literal["repair", "verify"] = "repair") -> None:
        super().__init__(fault)
        self.verb: Literal["repair", "verify"] = verb
        self.command: str | None = None

    @property
    @override
    def fault(self) -> str:
        return str(self.args[0])

    @override
    def __str__(self) -> str:
        return f"{self.fault}; run `{self.command or f'cairn {self.verb}'}`"


class PartitionsMissingError(IntegrityError):
    """A collection misses partitions, and only a search that is asked with ``partial`` leaves them out."""


class StorageError(CairnError):
    """The storage below refused a read or a write."""


class ClusterError(CairnError):
    """The workers of a Ray cluster cannot do the work.

    They are too few, die, or do not have what they need.
    """


class SchedulerDownError(CairnError):
    """No scheduler runs the schedules of a file, or it hangs."""


class TryAgainError(CairnError):
    """Nothing is broken: the same call may succeed later."""

    exit_code = 75


class CollectionBusyError(TryAgainError):
    """Another writer holds the collection."""


class WritesWaitingError(TryAgainError):
    """As many writes wait to be published as are kept."""


class SchedulerBusyError(TryAgainError):
    """Another scheduler holds the schedule file."""


class ClusterUnreachableError(TryAgainError):
    """No Ray cluster answers at the address."""


class EndpointDownError(TryAgainError):
    """An embeddings endpoint does not answer in time, or takes no request now."""


class DiskFullError(TryAgainError):
    """No space is left where the collection stands."""


def is_panic(error: BaseException) -> bool:
    """Tell whether Rust code gave up, which it does on some damaged files; Python sees no Exception then."""
    return type(error).__module__ == "pyo3_runtime" or type(error).__name__ == "RustPanic"


def extra_missing(
    error: ModuleNotFoundError, *, what: str, module: str, package: str, extra: str
) -> ConfigError:
    """Return the sentence for a package that an extra brings and that is not installed.

    Another missing module is raised as it is.
    """
    if (error.name or "").partition(".")[0] != module:
        raise error
    return ConfigError(
        f"{what} must have the package {package}, got none; install it with {install_command(extra)}"
    )


def first_line(error: object) -> str:
    """Return the first line of what an error or a reason says, the kind of one that says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def install_command(extra: str) -> str:
    """Return how an extra is installed: from a clone, as long as no distribution is published."""
    return f"`pip install '.[{extra}]'` in the folder of Cairn's clone"
