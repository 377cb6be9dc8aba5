"""Who of a world does not reach whom.

Law: a worker's word about another proves nothing alone. It counts together with the daemon's own loss of that worker,
when a rescale has waited in vain for the one to take the other's state, or when world after world has come to nothing
over it: then whoever most others are at odds with has to go, and the higher rank of two who only name each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping


class PeerReports:
    """What workers said of each other since the last step that was committed."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str], set[int]] = {}
        """Of the worlds that there were complaints in; by who complained, and of whom."""

    @property
    def worlds(self) -> int:
        """How many worlds there were complaints in, but for those that the end of a worker explains."""
        return len(set().union(*self._generations.values()))

    @property
    def pairs(self) -> Collection[tuple[str, str]]:
        """Who has complained of whom, the first to do so first; who has named nobody stands for both."""
        return self._generations.keys()

    def add(self, reporter: str, peer: str, generation: int) -> None:
        """The one does not reach the other; or cannot go on and names nobody, where they are the same."""
        self._generations.setdefault((reporter, peer), set()).add(generation)

    def explain(self, generation: int) -> None:
        """Somebody has gone, over whom those could not go on who have named nobody."""
        for pair, worlds in list(self._generations.items()):
            if len(set(pair)) == 1:
                worlds.discard(generation)
                if not worlds:
                    del self._generations[pair]

    def withdraw(self, reporter: str, peer: str) -> None:
        """The one reaches the other after all."""
        self._generations.pop((reporter, peer), None)

    def about(self, peer: str, generation: int) -> str:
        """Who does not reach it in this world; empty where everybody does."""
        said = self._generations.items()
        return next((who for (who, whom), worlds in said if who != whom == peer and generation in worlds), "")

    def between(self, one: str, other: str) -> bool:
        """Whether one of the two has named the other."""
        return (one, other) in self._generations or (other, one) in self._generations

    def worst(self, ranks: Mapping[str, int]) -> str | None:
        """Whom, of these with their ranks, most others are at odds with; None where none of them was named."""
        others: dict[str, set[str]] = {}
        for one, other in self._pairs():
            if one in ranks:
                others.setdefault(one, set()).add(other)
        return max(others, key=lambda worker: (len(others[worker]), ranks[worker]), default=None)

    def forget(self, worker: str) -> None:
        """Drop what it said, and what was said of it."""
        self._generations = {pair: worlds for pair, worlds in self._generations.items() if worker not in pair}

    def clear(self) -> None:
        """All is well."""
        self._generations.clear()

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for one, other in self._generations:
            yield one, other
            yield other, one
