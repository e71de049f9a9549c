"""Which documents a repair gives up, recorded before it does: a repair that was killed can still name them.

``LOST.json`` stands in the collection's folder from before the first step that gives up a document until the
repair has ended. The next repair reports what it names; ``verify`` finds it.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.durable import storage_errors, write_json
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError
from cairn.pipeline.index.lance_errors import LANCE_ERRORS, lance_errors
from cairn.pipeline.index.lance_index import LanceTables, Versions
from cairn.pipeline.index.layout import DELETED_BITS, DOCUMENTS_ARROW, CollectionLayout, generation_tag
from cairn.pipeline.index.mend import opens
from cairn.pipeline.index.position_files import open_document_positions
from cairn.pipeline.index.stored_files import read_manifest
from cairn.pipeline.index.tables import DOCUMENTS, TABLES
from cairn.pipeline.manifest import Manifest

LOSSES_NAME = "LOST.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Documents that are gone or older than in ``generation``, the newest there was.

    ``manifest_sha256`` is what ``CURRENT`` says of that generation. ``is_complete`` is False where the
    documents that it changed cannot be told.
    """

    generation: int
    manifest_sha256: str | None
    doc_ids: tuple[str, ...] = ()
    is_complete: bool = True

    @property
    def caveat(self) -> str:
        """Return what to add to a sentence about the repair, empty where every document is named."""
        if self.is_complete:
            return ""
        return (
            f"; which documents generation {self.generation} had changed cannot be told, so ingest what "
            "changed last again with --reread"
        )


def losses_path(layout: CollectionLayout) -> Path:
    """Return where a repair at work records what it gives up."""
    return layout.folder / LOSSES_NAME


def read_losses(layout: CollectionLayout) -> Losses | None:
    """Return what a repair that did not end gave up; None where there was none."""
    path = losses_path(layout)
    with storage_errors(f"reading {LOSSES_NAME}"):
        if not path.is_file():
            return None
        content = path.read_bytes()
    try:
        stored = json.loads(content)
        return Losses(
            generation=int(stored["generation"]),
            manifest_sha256=stored["manifest_sha256"],
            doc_ids=tuple(map(str, stored["doc_ids"])),
            is_complete=bool(stored["is_complete"]),
        )
    except (ValueError, KeyError, TypeError):
        newest = max(layout.generation_numbers(), default=0)
        return Losses(generation=newest, manifest_sha256=None, is_complete=False)


def record_losses(layout: CollectionLayout, losses: Losses) -> None:
    """Write down what is about to be given up, with what an earlier repair recorded; whole on disk after."""
    earlier = read_losses(layout)
    if earlier is not None:
        losses = replace(
            earlier,
            doc_ids=tuple(sorted({*losses.doc_ids, *earlier.doc_ids})),
            is_complete=losses.is_complete and earlier.is_complete,
        )
    if losses.doc_ids or not losses.is_complete:
        with storage_errors(f"writing {LOSSES_NAME}"):
            write_json(losses_path(layout), asdict(losses))


def losses_since(layout: CollectionLayout, newest: int, manifest: Manifest) -> Losses:
    """Return the documents that generation ``newest`` holds and this one does not, or in another version."""
    nothing = Losses(generation=newest, manifest_sha256=layout.manifest_sha256(newest))
    if newest == manifest.generation:
        return nothing
    for contents in (_content_hashes, _stored_contents):
        try:
            after = contents(layout, newest, manifest)
            before = contents(layout, manifest.generation, manifest)
        except CairnError:  # the damage is there
            continue
        joined = after.join(before, "doc_id", join_type="left outer", right_suffix="_before")
        is_same = pc.fill_null(pc.equal(joined.column("version"), joined.column("version_before")), False)
        changed = joined.filter(pc.invert(is_same)).column("doc_id").to_pylist()
        return replace(nothing, doc_ids=tuple(sorted(changed)))
    return replace(nothing, is_complete=False)


def newest_tagged(layout: CollectionLayout, beside: Manifest) -> int:
    """Return the newest generation that Lance's tags know, 0 where they cannot be read.

    They are read ``beside`` the versions of a generation.
    """
    prefix = generation_tag(0).removesuffix("0")
    try:
        tags = LanceTables.open(layout, beside.lance_versions).tags(
            DOCUMENTS, beside.lance_versions[DOCUMENTS]
        )
    except (CairnError, *LANCE_ERRORS):
        return 0
    numbers = [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def tagged_versions(layout: CollectionLayout, number: int, beside: Manifest) -> Versions:
    """Return the versions that Lance's tags pin for a generation, whose manifest may be gone.

    The tags are read ``beside`` the versions of another generation. Raises :class:`DamageError` where they
    name none that opens.
    """
    tables = LanceTables.open(layout, beside.lance_versions)
    versions: Versions = {}
    for table in TABLES:
        with lance_errors(f"reading the tags of table `{table}`", damaged=True):
            version = tables.tags(table, beside.lance_versions[table]).get(generation_tag(number))
        if version is None or not opens(layout.lance_folder / f"{table}.lance", version):
            raise DamageError(f"no version of table `{table}` is tagged {generation_tag(number)}")
        versions[table] = version
    return versions


def _content_hashes(layout: CollectionLayout, number: int, beside: Manifest) -> pa.Table:
    try:
        versions = dict(read_manifest(layout, number).lance_versions)
    except IntegrityError:
        versions = tagged_versions(layout, number, beside)
    return content_hashes_at(layout, versions)


def content_hashes_at(layout: CollectionLayout, versions: Versions) -> pa.Table:
    """Return ``doc_id`` and ``version``, a hash of the content, of each document at pinned versions."""
    batches = list(LanceTables.open(layout, versions).published_hashes(versions))
    schema = pa.schema([("doc_id", pa.string()), ("version", pa.string())])
    return pa.concat_tables(
        [schema.empty_table(), pa.Table.from_batches(batches).rename_columns(schema.names).cast(schema)]
        if batches
        else [schema.empty_table()]
    )


def _stored_contents(layout: CollectionLayout, number: int, _: Manifest) -> pa.Table:
    """Read from the position files what the manifest and Lance would tell if they were whole."""
    parts: list[pa.Table] = []
    for path in sorted(layout.generation_folder(number).glob(f"*{DOCUMENTS_ARROW}")):
        documents = open_document_positions(path)
        name = "content" if "content" in documents.schema.names else "row_id"
        table = pa.table(
            {"doc_id": documents.column("doc_id").cast(pa.string()), "version": documents.column(name)}
        )
        bits = path.with_name(path.name.removesuffix(DOCUMENTS_ARROW) + DELETED_BITS)
        if bits.exists():
            deleted = np.unpackbits(np.frombuffer(bits.read_bytes(), np.uint8), bitorder="little")
            if len(deleted) >= table.num_rows:
                table = table.filter(pa.array(deleted[: table.num_rows] == 0))
        parts.append(table)
    if not parts:
        raise DamageError(f"generation {number} has no position files")
    return pa.concat_tables(parts)
