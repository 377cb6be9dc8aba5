"""Packings without a search: each buffer at its lowest free offset, in several orders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forged.memory.traces.lifetimes import Integers, Lifetimes


def packings(lifetimes: Lifetimes) -> Iterator[Integers]:
    """The offsets of the buffers, for one order after the other."""
    sizes, durations = lifetimes.sizes, lifetimes.durations
    spans = lifetimes.last - lifetimes.first
    for keys in (
        (-sizes,),
        (-spans, -sizes),
        (-durations, -sizes),
        (-(sizes.astype(float) * durations),),
        (-(sizes.astype(float) * spans),),
        (lifetimes.first, -sizes),
    ):
        columns = [key.tolist() for key in keys]
        yield _packed(lifetimes, sorted(range(len(sizes)), key=lambda buffer: [key[buffer] for key in columns]))


def _packed(lifetimes: Lifetimes, order: list[int]) -> Integers:
    """The offsets if the buffers are placed in this order."""
    placed = np.array(order)
    first, last, sizes = lifetimes.first[placed], lifetimes.last[placed], lifetimes.sizes[placed]
    offsets = np.zeros(len(order), sizes.dtype)
    for number in range(len(order)):
        others = np.flatnonzero((first[:number] < last[number]) & (last[:number] > first[number]))
        offsets[number] = _lowest_gap(offsets[others], sizes[others], int(sizes[number]))
    found = np.empty_like(offsets)
    found[placed] = offsets
    return found


def _lowest_gap(offsets: Integers, sizes: Integers, size: int) -> int:
    """The lowest offset at which so many bytes overlap none of these."""
    if not len(offsets):
        return 0
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate(starts + sizes[order])
    if starts[0] >= size:
        return 0
    wide = np.flatnonzero(starts[1:] - ends[:-1] >= size)
    return int(ends[wide[0]] if len(wide) else ends[-1])
