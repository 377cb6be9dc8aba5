"""Peer reports: which workers of a world say that they cannot reach which.

Invariants:
- A peer report proves nothing alone. It counts together with the daemon's own loss of the reported worker, when a
  rescale has timed out over it, or when several worlds in a row have failed over it: then the worker with the most
  peer reports is evicted, of two that report only each other the one with the higher rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping


class PeerReports:
    """The peer reports since the last committed step."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str], set[int]] = {}
        """The worlds with a report, by reporter and reported worker."""

    @property
    def worlds(self) -> int:
        """In how many worlds there were reports that no worker's end explains."""
        return len(set().union(*self._generations.values()))

    @property
    def pairs(self) -> Collection[tuple[str, str]]:
        """Reporter and reported worker, oldest first; a reporter that named no peer stands for both."""
        return self._generations.keys()

    def add(self, reporter: str, peer: str, generation: int) -> None:
        """Record that the reporter cannot reach the peer, or cannot continue if both are the same."""
        self._generations.setdefault((reporter, peer), set()).add(generation)

    def explain(self, generation: int) -> None:
        """Drop this world's reports that name no peer: a worker's end explains them."""
        for pair, worlds in list(self._generations.items()):
            if len(set(pair)) == 1:
                worlds.discard(generation)
                if not worlds:
                    del self._generations[pair]

    def withdraw(self, reporter: str, peer: str) -> None:
        """Drop the reporter's reports about the peer, which it now reaches."""
        self._generations.pop((reporter, peer), None)

    def reporter_of(self, peer: str, generation: int) -> str:
        """The first worker that cannot reach the peer in this world; empty if there is none."""
        reports = self._generations.items()
        return next((one for (one, other), worlds in reports if one != other == peer and generation in worlds), "")

    def between(self, one: str, other: str) -> bool:
        """Whether one of the two has reported the other."""
        return (one, other) in self._generations or (other, one) in self._generations

    def worst(self, ranks: Mapping[str, int]) -> str | None:
        """The worker among `ranks` with reports by or about the most peers; None if no report names any of them."""
        peers: dict[str, set[str]] = {}
        for one, other in self._directed_pairs():
            if one in ranks:
                peers.setdefault(one, set()).add(other)
        return max(peers, key=lambda worker: (len(peers[worker]), ranks[worker]), default=None)

    def forget(self, worker: str) -> None:
        """Drop all reports by and about a worker."""
        self._generations = {pair: worlds for pair, worlds in self._generations.items() if worker not in pair}

    def clear(self) -> None:
        self._generations.clear()

    def _directed_pairs(self) -> Iterator[tuple[str, str]]:
        for one, other in self._generations:
            yield one, other
            yield other, one
