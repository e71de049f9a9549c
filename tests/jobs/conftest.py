"""What tests of jobs share with those of the line."""

from __future__ import annotations

from tests.line.conftest import config, root, stop_at

__all__ = ["config", "root", "stop_at"]
