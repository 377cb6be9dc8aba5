"""Chooses the source of each transfer.

Invariants:
- A copy on the destination's host comes first, then any copy, then the origin.
- Equally good copies take turns, so that the load is even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Mask, Places, ordinals
from forged.data.model import SourceKind

KINDS = tuple(SourceKind)
Kinds = npt.NDArray[np.uint8]
"""Indices into `KINDS`."""


@dataclass(frozen=True, slots=True)
class Sources:
    """For each transfer the source, -1 for the origin, and its kind."""

    workers: Column
    kinds: Kinds


def choose_sources(copies: Column, destinations: Column, hosts: Column) -> Sources:
    """The source of each transfer; `copies` has a row for the owners, then one for each replica."""
    transfers = destinations.size
    sources = Sources(
        np.full(transfers, NOBODY, np.int32), np.full(transfers, KINDS.index(SourceKind.ORIGIN), np.uint8)
    )
    found = np.flatnonzero((copies != NOBODY).any(axis=0))
    if found.size:
        row = _rows(copies[:, found], destinations[found], hosts)
        sources.workers[found] = copies[row, found]
        sources.kinds[found] = np.where(row == 0, KINDS.index(SourceKind.OWNER), KINDS.index(SourceKind.REPLICA))
    return sources


def _rows(copies: Column, destinations: Column, hosts: Column) -> Places:
    """The chosen row in each column; every column has a copy."""
    there = copies != NOBODY
    near = there & (hosts[copies] == hosts[destinations])
    good = np.where(near.any(axis=0), near, there)
    return _nth(good, _turns(good, copies, hosts.size))


def _turns(good: Mask, copies: Column, workers: int) -> Places:
    """Which of the good copies is next, in turns among the transfers with the same first good copy."""
    turns = np.zeros(good.shape[1], np.intp)
    choices = good.sum(axis=0)
    several = np.flatnonzero(choices > 1)
    first = copies[good[:, several].argmax(axis=0), several]
    turns[several] = ordinals(first, workers) % choices[several]
    return turns


def _nth(good: Mask, turns: Places) -> Places:
    rows: Places = (good & (good.cumsum(axis=0) == turns + 1)).argmax(axis=0)
    return rows
