"""What is read in the place of a damaged file of a generation.

    small file      its second copy
    deleted.bits    which documents of the segment are gone from the pinned table; the hash says that it is so
    tokens.arrow    nothing: where no generation is whole, searches go without token vectors

All other damage is an error of the caller's generation: see ``repair``.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.index.copies import lost_for_good, whole_copy
from cairn.pipeline.index.lance_errors import lance_errors
from cairn.pipeline.index.layout import (
    ALL_TOKENS_ARROW,
    DELETED_BITS,
    DOCUMENTS_ARROW,
    TOKENS_ARROW,
    CollectionLayout,
)
from cairn.pipeline.index.position_files import open_document_positions
from cairn.pipeline.index.segments.deleted import DeletedRows, bits_of
from cairn.pipeline.index.tables import DOCUMENTS, open_pinned_dataset
from cairn.pipeline.manifest import FileRecord, Manifest, SegmentRecord

if TYPE_CHECKING:
    import lance


def require_copies(
    layout: CollectionLayout,
    number: int,
    records: Mapping[str, FileRecord],
    damaged: Iterable[tuple[str, str]],
) -> dict[str, str]:
    """Return what is wrong with each damaged file; one without a whole copy raises :class:`DamageError`."""
    found = dict(damaged)
    for name, problem in found.items():
        if whole_copy(layout, number, name, records.get(name)) is None:
            if advice := lost_for_good(layout, name):
                raise IntegrityError(f"{name} of generation {number} {problem}; {advice}")
            raise DamageError(f"{name} of generation {number} {problem}")
    return found


def take_dispensable(manifest: Manifest, damaged: dict[str, str], *, without_tokens: bool) -> dict[str, str]:
    """Take the files out of ``damaged`` that need no copy, and return what is wrong with each."""
    dispensable = {record.name + DELETED_BITS for record in manifest.segments if record.deleted_documents}
    if without_tokens:
        dispensable |= {ALL_TOKENS_ARROW, *(record.name + TOKENS_ARROW for record in manifest.segments)}
    return {name: damaged.pop(name) for name in sorted(dispensable & damaged.keys())}


def damage_warning(
    layout: CollectionLayout, number: int, copied: Mapping[str, str], dispensed: Mapping[str, str]
) -> str | None:
    """Return a sentence for the user about the first damaged file, None where all are whole."""
    for name, problem in {**dispensed, **copied}.items():
        instead = "its second copy is read"
        if name in dispensed:
            is_bits = name.endswith(DELETED_BITS)
            instead = "it is made again from the tables" if is_bits else "searches go without token vectors"
        return str(layout.damaged(f"{name} of generation {number} {problem}: {instead}"))
    return None


def deleted_by_table(
    layout: CollectionLayout, manifest: Manifest, record: SegmentRecord, dataset: lance.LanceDataset
) -> DeletedRows:
    """Find the deleted documents of a segment by the ids that the table of documents has left of it.

    Rows of the table stand in the order of the segments. Where that does not give the bits of the manifest,
    :class:`DamageError` is raised.
    """
    before = manifest.segments[: manifest.segments.index(record)]
    begin = sum(each.live_documents for each in before)
    folder = layout.generation_folder(manifest.generation)
    doc_ids = open_document_positions(folder / (record.name + DOCUMENTS_ARROW)).column("doc_id")
    with lance_errors("reading the ids of documents", damaged=True):
        left = dataset.to_table(
            columns=["doc_id"], offset=begin, limit=record.live_documents, scan_in_order=True
        ).column("doc_id")
    is_left = pc.is_in(doc_ids, value_set=left.cast(doc_ids.type).combine_chunks())
    deleted = DeletedRows(len(doc_ids), np.flatnonzero(~is_left.to_numpy(zero_copy_only=False)))
    name = record.name + DELETED_BITS
    if hashlib.sha256(bits_of(deleted)).hexdigest() != manifest.files[name].sha256:
        raise DamageError(f"{name} of generation {manifest.generation} must be as the tables say")
    return deleted


def deleted_again(layout: CollectionLayout, manifest: Manifest, name: str) -> DeletedRows | None:
    """Return the rows that a damaged ``deleted.bits`` must mark.

    None for other files, and where the rows do not tell.
    """
    for record in manifest.segments:
        documents = record.name + DOCUMENTS_ARROW
        folder = layout.generation_folder(manifest.generation)
        if (
            name == record.name + DELETED_BITS
            and manifest.files[documents].problem(folder / documents) is None
        ):
            try:
                version = manifest.lance_versions[DOCUMENTS]
                dataset = open_pinned_dataset(layout.lance_folder, DOCUMENTS, version)
                return deleted_by_table(layout, manifest, record, dataset)
            except IntegrityError:
                return None
    return None
