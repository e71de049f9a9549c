"""Commit and publish what ``encode_corpus`` left."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("write_index")
