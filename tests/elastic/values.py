"""Workers and topologies for tests, made up or drawn by Hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from forged.elastic.model import ClusterTopology, WorkerId

HUGE = (pytest.param(10**400, id="no float"), pytest.param(10**6000, id="no text"))
"""Whole numbers that are too large to become what they usually can."""


def worker(number: int) -> WorkerId:
    return WorkerId(f"w{number}", f"host{number}", 7000 + number)


def topology(*numbers: int, epoch: int = 0, at: float = 0.0) -> ClusterTopology:
    return ClusterTopology(tuple(map(worker, numbers)), epoch, at)


WORKERS = st.integers(0, 20).map(worker)
TOPOLOGIES = st.builds(
    ClusterTopology,
    workers=st.lists(WORKERS, unique=True).map(tuple),
    epoch=st.integers(0, 2**40),
    last_updated=st.floats(0, 1e12),
)
