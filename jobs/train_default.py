"""Train an encoder from texts and pairs to model, in one command, by configs/train_default.toml.

What it does is :mod:`cairn.pipeline.lab.train.default_encoder`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cairn.pipeline.lab.train.default_encoder import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent / "configs" / "train_default.toml"))
