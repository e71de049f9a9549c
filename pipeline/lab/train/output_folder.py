"""Where a training beside a base that stays as it is leaves what it trained, and its log beside that."""

from __future__ import annotations

from pathlib import Path

from cairn.pipeline.errors import ConfigError


def require_new(folder: Path) -> None:
    """Raise :class:`ConfigError` for a place that is taken, or below a file."""
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise ConfigError(
            f"the output folder of a training must lie in a folder, got {str(folder)!r} below a file; "
            "choose another"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"the output folder of a training must be new or empty, got {str(folder)!r}; choose another"
        )


def log_path_of(folder: Path) -> Path:
    """Return where a run's log lies, beside its folder.

    Raise :class:`ConfigError` where something lies there already.
    """
    path = folder.with_name(f"{folder.name}.jsonl")
    if path.exists():
        raise ConfigError(
            f"the log of a run must not replace a file, got {str(path)!r}; move it away, or "
            "choose another folder"
        )
    return path
