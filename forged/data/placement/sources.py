"""Which copy of a shard a transfer takes.

Law: a copy on the destination's own host, if there is one; else any that can be read; else the dataset's origin. Where
several are as good they take turns, so that what lies at the same workers is fetched from each of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Mask, Places, ordinals
from forged.data.model import SourceKind

KINDS = tuple(SourceKind)
Kinds = npt.NDArray[np.uint8]
"""Places in `KINDS`."""


@dataclass(frozen=True, slots=True)
class Sources:
    """For each transfer, who is asked, or nobody, and what that is."""

    workers: Column
    kinds: Kinds


def choose_sources(copies: Column, destinations: Column, hosts: Column) -> Sources:
    """Where each transfer starts; `copies` has a row for the owners, then one for each further copy."""
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
    """Which row is taken in each column, every one of which has a copy."""
    there = copies != NOBODY
    near = there & (hosts[copies] == hosts[destinations])
    good = np.where(near.any(axis=0), near, there)
    return _nth(good, _turns(good, copies, hosts.size))


def _turns(good: Mask, copies: Column, workers: int) -> Places:
    """Which of the good copies it is the turn of: counted among the transfers whose first good copy is the same."""
    turns = np.zeros(good.shape[1], np.intp)
    choices = good.sum(axis=0)
    several = np.flatnonzero(choices > 1)
    first = copies[good[:, several].argmax(axis=0), several]
    turns[several] = ordinals(first, workers) % choices[several]
    return turns


def _nth(good: Mask, turns: Places) -> Places:
    rows: Places = (good & (good.cumsum(axis=0) == turns + 1)).argmax(axis=0)
    return rows
