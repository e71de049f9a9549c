"""Bring a collection up to date with its sources."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("build_index")
