"""Campaigns of random episodes, each replayed by its seed, until the time is up.

An episode has a random generator of its own seed and an empty folder, counts what it did in a tally, and
raises :class:`FaultError` where the collection or the server did what it must not.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index import tiers

WHOLE_SHARE = 0.25
"""Share of episodes in which small collections are one segment, as with the settings of a release."""
Tally = Counter[str]
Episode = Callable[[random.Random, Path, Tally], None]


class FaultError(Exception):
    """What must not happen: a lost, torn or doubled document, a wrong answer, a server error."""


def require(condition: bool, sentence: str) -> None:
    """Raise a fault unless the condition holds."""
    if not condition:
        raise FaultError(sentence[:2_000])


def run_episode(name: str, episode: Episode, seed: int, tally: Tally) -> str | None:
    """Run one episode; return the sentence of its fault."""
    with tempfile.TemporaryDirectory(prefix="cairn-nightly-") as folder, _segments(seed, tally):
        try:
            episode(random.Random(f"{name} {seed}"), Path(folder), tally)
        except FaultError as fault:
            return str(fault)
        except Exception as error:  # noqa: BLE001 - a broken campaign is a finding, too
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {place.name}:{place.lineno}: {error}"[:2_000]
    return None


@contextlib.contextmanager
def _segments(seed: int, tally: Tally) -> Generator[None]:
    """Let the smallest collections of most episodes have segments, merged sooner or later.

    Otherwise collections as small as these would be one segment, made whole by each publication.
    """
    rng = random.Random(f"segments {seed}")
    if rng.random() < WHOLE_SHARE:
        yield
        return
    tally["with_segments"] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "WHOLE_CHUNKS", 0)
        patch.setattr(tiers, "FACTOR", rng.choice((2, 3, 8)))
        patch.setattr(tiers, "MAX_DELETED_SHARE", rng.choice((0.3, 0.8)))
        yield


def run_campaigns(
    campaigns: Mapping[str, Episode],
    *,
    seconds: float,
    first_seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run episodes of the campaigns in turn until the time is up; return the summary."""
    tried = commit()  # another one may be checked out before the end
    started, seed = time.monotonic(), first_seed
    tallies = {name: Tally() for name in campaigns}
    faults = list[dict[str, Any]]()
    while time.monotonic() - started < seconds:
        for name, episode in campaigns.items():
            if time.monotonic() - started >= seconds:
                break
            began = time.monotonic()
            fault = run_episode(name, episode, seed, tallies[name])
            tallies[name]["episodes"] += 1
            say(f"campaign={name} seed={seed} seconds={time.monotonic() - began:.1f} fault={fault or 'none'}")
            if fault is not None:
                replay = f"make nightly CAMPAIGN={name} SEED={seed}"
                say(f"replay: {replay}")
                faults.append({"campaign": name, "seed": seed, "fault": fault, "replay": replay})
        seed += 1
    return {
        "commit": tried,
        "first_seed": first_seed,
        "last_seed": seed - 1,
        "seconds": round(time.monotonic() - started),
        "campaigns": {name: dict(sorted(tally.items())) for name, tally in tallies.items()},
        "faults": faults,
    }


def commit() -> str:
    """Return the commit that is tried, ``unknown`` outside a checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
