"""Stage and encode what changed; the work is kept for ``write_index``."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("encode_corpus")
