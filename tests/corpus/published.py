"""Stage 1 beside a committer that is a dictionary: what a collection would hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.ledger import Ledger, record_run
from cairn.pipeline.corpus.quarantine import RowWriter
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.corpus.source_record import create_record, holds_for
from cairn.pipeline.corpus.staging import Staged, stage_changes

CONFIG = CorpusConfig()


class Published:
    """What was published by the runs so far; one that is to ``reread`` passes over no file."""

    def __init__(self, folder: Path, *, reread: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.reread = reread
        self.documents: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.generation = 0
        self.passed_over: list[str] = []
        self.staged: Staged

    @property
    def manifest_sha256(self) -> str:
        return sha256(f"{self.generation}".encode()).hexdigest()

    def stored(self) -> list[pa.RecordBatch]:
        columns = {"doc_id": [*self.documents], "source_file": [self.files[each] for each in self.documents]}
        return [pa.RecordBatch.from_pydict(columns)]

    def ingest(
        self,
        *sources: Path,
        sync: bool = False,
        killed: str = "",
        config: CorpusConfig = CONFIG,
        shard_characters: int = 1_000,
        encoded: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run once, or up to a kill before the publication or before the record; say what was done.

        Documents that are ``encoded`` already are given with the hashes of their contents.
        """
        record = self.folder / "sources.sqlite"
        if self.reread or not holds_for(record, self.manifest_sha256):
            create_record(record, self.manifest_sha256, [([*self.documents], [*self.documents.values()])])
        scan = scan_sources([str(source) for source in sources], config, None if self.reread else record)
        quarantine = self.folder / "quarantine.parquet"
        quarantine.unlink(missing_ok=True)
        with Ledger(self.folder / "ledger.sqlite", record) as ledger:
            if encoded:
                ledger.load_encoded(0, [*encoded], [*encoded.values()])
            folder = self.folder / "staged"
            with RowWriter(quarantine) as writer:
                staged = stage_changes(
                    scan, config, ledger, folder, shard_characters, writer, stored=self.stored
                )
            self.staged = staged
            rows = list(chain.from_iterable(pq.read_table(path).to_pylist() for path in staged.shards))
            is_synced = sync and staged.is_complete
            gone = {
                "replaced": list(chain.from_iterable(ledger.replaced_ids())),
                "vanished": list(chain.from_iterable(ledger.vanished_ids())),
            }
            if killed != "early":
                deleted = gone["vanished"] if is_synced else []
                if rows or deleted:
                    self.generation += 1
                for doc_id in (*gone["replaced"], *deleted):
                    del self.documents[doc_id]
                self.documents |= {row["doc_id"]: row["content_sha256"] for row in rows}
                self.files |= {row["doc_id"]: row["source_file"] for row in rows}
                if not killed:
                    record_run(ledger, self.manifest_sha256, has_deleted=bool(deleted))
        self.passed_over = [Path(scan.files[place].file.path).name for place in staged.passed_over]
        refused = pq.read_table(quarantine).to_pylist() if quarantine.exists() else []
        return {
            **{
                name: value for name, value in asdict(staged).items() if name not in ("shards", "passed_over")
            },
            **gone,
            "staged_rows": rows,
            "refused": sorted(refused, key=repr),
            "documents": dict(self.documents),
        }
