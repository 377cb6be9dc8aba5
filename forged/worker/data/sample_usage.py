"""What the steps of a worker's worlds have used of the dataset.

Law: a step's use is noted when the step is committed, in the world in which it was, and kept until the daemon has it.
A step that is done again has used nothing. All members note the same, so any of them may tell it, and telling it twice
changes nothing. The notes travel with the state: whoever has the state of a step can tell what led to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forged.data.sampling.sampler import ElasticSampler
from forged.data.sampling.usage import WHOLE_MAX, Run, Use, compressed, runs_of

RUNS_TOLD_MAX = 10_000
"""So many rows are told at once."""
FRESH_STEPS_MAX = 100
"""So many steps are noted as they come, before rows are made of them."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int, list[Run]]]).decode


@dataclass(slots=True)
class Noted:
    """What the steps of one world have used."""

    begins_at: int
    rows: list[Run] = field(default_factory=list)
    fresh: list[tuple[int, Sequence[Use]]] = field(default_factory=list)

    def add(self, step: int, used: Sequence[Use]) -> None:
        """A step is committed."""
        self.fresh.append((step, used))
        if len(self.fresh) >= FRESH_STEPS_MAX:
            self._compress()

    @property
    def runs(self) -> list[Run]:
        """All of it, in few rows."""
        self._compress()
        return self.rows

    def parts(self) -> Iterator[list[Run]]:
        """The same in parts of whole steps, the first ones first; not many more rows in each than may be told."""
        runs = self.runs
        while len(runs) > RUNS_TOLD_MAX:
            steps = sorted(run.step for run in runs)
            end = max(steps[RUNS_TOLD_MAX], steps[0] + 1)
            yield _between(runs, 0, end)
            runs = _between(runs, end, WHOLE_MAX)
        if runs:
            yield runs

    def forget_before(self, step: int) -> None:
        """The daemon has what was before."""
        self.rows = _between(self.runs, step, WHOLE_MAX)

    def _compress(self) -> None:
        if self.fresh:
            self.rows, self.fresh = compressed([*self.rows, *runs_of(self.fresh)]), []


def _between(runs: Sequence[Run], first: int, end: int) -> list[Run]:
    return [part for run in runs if (part := run.between(first, end)) is not None]


class SampleUsage:
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
        self._noted = {number: noted for number, noted in self._noted.items() if noted.runs}
        self._noted.setdefault(generation, Noted(begins_at))

    def finish(self) -> None:
        """A step is finished; the state goes behind it, and so does the sampler."""
        self._finished = self.sampler.advance()

    def count(self, step: int) -> None:
        """The step that was finished is committed."""
        noted = self._noted.get(self._generation)
        if noted is not None:
            noted.add(step, self._finished)
        self._finished = ()

    def unspoken(self) -> Iterator[tuple[int, int, list[Run]]]:
        """What the daemon may not have: the generation, where it began, and what its steps used, whole steps each."""
        for generation, noted in sorted(self._noted.items()):
            for runs in noted.parts():
                yield generation, noted.begins_at, runs

    def worlds(self) -> list[tuple[int, int]]:
        """Of which there is something that the daemon may not have: the generation, and where it began."""
        return [(generation, noted.begins_at) for generation, noted in sorted(self._noted.items()) if noted.runs]

    def known(self, generation: int, step: int) -> None:
        """The daemon has what this world has used up to there."""
        noted = self._noted.get(generation)
        if noted is None:
            return
        noted.forget_before(step)
        if not noted.rows and generation != self._generation:
            del self._noted[generation]

    def state_dict(self) -> dict[str, Any]:
        """The notes, to travel with the state that the steps have led to."""
        noted = [(generation, noted.begins_at, noted.runs) for generation, noted in sorted(self._noted.items())]
        return {"noted": _encode(noted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the notes of who was further: it knows all of its worlds, or has told the daemon."""
        self._finished = ()
        for generation, begins_at, runs in _decode(state["noted"]):
            self._noted[generation] = Noted(begins_at, runs)
