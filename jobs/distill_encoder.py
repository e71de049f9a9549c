"""Distill an encoder as a job: `cairn distill` with its settings in a file."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("distill_encoder")
