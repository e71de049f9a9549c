"""``make nightly``: every campaign in turn until the time is up, or one episode again by its seed."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from pathlib import Path

from tests.nightly import damage, hostile, operations, writes
from tests.nightly.campaign import Tally, commit, run_campaigns, run_episode

CAMPAIGNS = {
    "operations": operations.episode,
    "hostile": hostile.episode,
    "damage": damage.episode,
    "writes": writes.episode,
}


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Run what the command line asks for; 1 where a fault was found."""
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--campaign", choices=sorted(CAMPAIGNS), help="this one alone")
    parser.add_argument("--seed", type=int, help="run this episode of --campaign again")
    parser.add_argument("--first-seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--summary", type=Path, default=Path("nightly.json"))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of what is damaged, which is what is tried
    chosen = {given.campaign: CAMPAIGNS[given.campaign]} if given.campaign else CAMPAIGNS
    if given.seed is not None:
        if given.campaign is None:
            parser.error("--seed must go with --campaign")
        tally = Tally()
        fault = run_episode(given.campaign, chosen[given.campaign], given.seed, tally)
        say(f"campaign={given.campaign} seed={given.seed} fault={fault or 'none'} {dict(tally)}")
        return int(fault is not None)
    seconds = 3_600 * given.hours + 60 * given.minutes
    if seconds <= 0:
        parser.error("--hours or --minutes must be more than 0")
    say(f"commit={commit()} first_seed={given.first_seed} seconds={seconds:.0f}")
    summary = run_campaigns(chosen, seconds=seconds, first_seed=given.first_seed, say=say)
    given.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(json.dumps(summary))
    return int(bool(summary["faults"]))


if __name__ == "__main__":
    sys.exit(main())
