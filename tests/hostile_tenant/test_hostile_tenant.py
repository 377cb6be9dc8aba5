"""A short attack by one job's token; `make soak` makes a long one and measures it."""

from __future__ import annotations

from pathlib import Path

from tests.hostile_tenant.__main__ import MEMORY_MAX_BYTES
from tests.hostile_tenant.measure import VICTIM_NOTES, measure

ATTACK_S = 4.0


async def test_other_job_trains_and_operator_works_during_an_attack(tmp_path: Path) -> None:
    figures = await measure(tmp_path, ATTACK_S)
    assert figures.steps_per_s_during > 0
    assert figures.victim_failures == 0
    assert figures.victim_notes_kept >= VICTIM_NOTES
    assert figures.forgectl_failures == 0
    assert figures.daemon_peak_bytes < MEMORY_MAX_BYTES
    assert figures.attacks["notes"] > 0
    assert figures.attacks["connections"] > 0
    assert figures.attacks["AllocateMemory"] > 0
