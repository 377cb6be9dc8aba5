"""`python -m tests.hostile_tenant [--seconds S]`: attack a daemon and print the figures as JSON.

The exit code is 1 if a goal is missed: the other job's step rate within 5 %, each `forgectl` within a second, the
daemon's memory below `MEMORY_MAX_BYTES`, and no worker and no fact of the other job lost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.hostile_tenant.measure import VICTIM_NOTES, Figures, measure

SECONDS = 300.0
STEP_RATE_MIN = 0.95
FORGECTL_MAX_S = 1.0
MEMORY_MAX_BYTES = 1 << 30
"""Above the sum of `daemon_bytes_max`, the remembered replies and the journal with its indexes."""


def missed_goals(figures: Figures) -> list[str]:
    """The goals that the figures miss."""
    goals = {
        "step rate": figures.steps_per_s_during >= STEP_RATE_MIN * figures.steps_per_s_before,
        "forgectl": max(figures.forgectl_s) <= FORGECTL_MAX_S and not figures.forgectl_failures,
        "memory": figures.daemon_peak_bytes <= MEMORY_MAX_BYTES,
        "facts": figures.victim_notes_kept >= VICTIM_NOTES,
        "workers": figures.victim_failures == 0,
    }
    return [goal for goal, met in goals.items() if not met]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the duration of the attack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forged-hostile-") as directory:
        figures = asyncio.run(measure(Path(directory), options.seconds))
    print(figures.as_json())
    missed = missed_goals(figures)
    for goal in missed:
        print(f"missed: {goal}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
