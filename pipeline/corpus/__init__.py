"""Stage 1: from the user's Parquet to checked, deduplicated, staged shards.

    sources ─▶ scan (footers, one schema) ─▶ decode ─▶ checks ─▶ ledger ─▶ staged shards
                     │ refuses drift            │         │         │
                     ▼                          └─────────┴────┬────┘
              one clear error                       quarantine, with a reason

Memory is bounded everywhere by ``CorpusConfig.batch_bytes``, not by files, row groups or rows.
"""

from cairn.pipeline.corpus.checks import CheckedBatch
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.quarantine import REJECTED_SCHEMA, QuarantineWriter
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources
from cairn.pipeline.corpus.sources import SourceFile, resolve_sources
from cairn.pipeline.corpus.staging import Staged, plan_changes, stage_changes

__all__ = [
    "REJECTED_SCHEMA",
    "CheckedBatch",
    "Ledger",
    "QuarantineWriter",
    "Scan",
    "SourceFile",
    "Staged",
    "plan_changes",
    "read_checked",
    "resolve_sources",
    "scan_sources",
    "stage_changes",
]
