"""Compress a model as a job: `cairn compress` with its settings in a file."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("compress_model")
