"""Train an encoder as a job: `cairn train` with its settings in a file, GPUs as PyTorch finds them."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("train_encoder")
