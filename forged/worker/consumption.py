"""What the steps of a worker's worlds have used of the dataset.

Law: a step's use is noted when the step is committed, in the world in which it was, and kept until the daemon has it.
A step that is done again has used nothing. All members note the same, so any of them may tell it, and telling it twice
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forged.data.sampler import ElasticSampler
from forged.data.usage import Run, Use, compressed, runs_of

RUNS_TOLD_MAX = 10_000
"""So many rows are told at once."""


@dataclass(slots=True)
class Noted:
    """What the steps of one world have used."""

    begins_at: int
    runs: list[Run] = field(default_factory=list)


class Consumption:
    """Advances the sampler with the steps, and notes what they use."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self._generation = 0
        self._finished: Sequence[Use] = ()
        """Of the step that is finished and may not be committed."""
        self._noted: dict[int, Noted] = {}

    def enter(self, generation: int, begins_at: int) -> None:
        """Another world begins behind so many steps."""
        self._generation, self._finished = generation, ()
        self._noted.setdefault(generation, Noted(begins_at))

    def finish(self) -> None:
        """A step is finished; the state goes behind it, and so does the sampler."""
        self._finished = self.sampler.advance()

    def count(self, step: int) -> None:
        """The step that was finished is committed."""
        noted = self._noted.get(self._generation)
        if noted is not None:
            noted.runs = compressed([*noted.runs, *runs_of([(step, self._finished)])])
        self._finished = ()

    def unspoken(self) -> Iterator[tuple[int, int, list[Run]]]:
        """What the daemon may not have: the generation, where it began, and what its steps used."""
        for generation, noted in sorted(self._noted.items()):
            for start in range(0, len(noted.runs), RUNS_TOLD_MAX):
                yield generation, noted.begins_at, noted.runs[start : start + RUNS_TOLD_MAX]

    def told(self, generation: int, runs: Sequence[Run]) -> None:
        """The daemon has these."""
        noted = self._noted[generation]
        end = max(run.end_step for run in runs)
        noted.runs = [rest for run in noted.runs if (rest := run.between(end, run.end_step)) is not None]
        if not noted.runs and generation != self._generation:
            del self._noted[generation]
