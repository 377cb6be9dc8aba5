"""Records which samples the steps of a worker's worlds have used, until the daemon knows it.

Invariants:
- A step's usage is recorded when the step is committed, under its world's generation. An uncommitted step uses nothing.
- All members record the same, so any of them may report it, more than once.
- The records travel with the training state, so every worker with the state of a step can report what led to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forged.data.sampling.sampler import ElasticSampler
from forged.data.sampling.usage import WHOLE_MAX, Run, Use, compressed, runs_of

REPORT_ROWS_MAX = 10_000
"""How many rows one report contains."""
UNCOMPRESSED_STEPS_MAX = 100
"""How many steps are kept as they are before they are compressed into rows."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int, list[Run]]]).decode


@dataclass(slots=True)
class WorldUsage:
    """The usage of one world's steps."""

    begins_at: int
    rows: list[Run] = field(default_factory=list)
    uncompressed: list[tuple[int, Sequence[Use]]] = field(default_factory=list)

    def add(self, step: int, used: Sequence[Use]) -> None:
        """Add a committed step."""
        self.uncompressed.append((step, used))
        if len(self.uncompressed) >= UNCOMPRESSED_STEPS_MAX:
            self._compress()

    @property
    def runs(self) -> list[Run]:
        """All usage as compressed rows."""
        self._compress()
        return self.rows

    def parts(self) -> Iterator[list[Run]]:
        """The rows in parts of whole steps, in order, of about `REPORT_ROWS_MAX` each."""
        runs = self.runs
        while len(runs) > REPORT_ROWS_MAX:
            steps = sorted(run.step for run in runs)
            end = max(steps[REPORT_ROWS_MAX], steps[0] + 1)
            yield _between(runs, 0, end)
            runs = _between(runs, end, WHOLE_MAX)
        if runs:
            yield runs

    def forget_before(self, step: int) -> None:
        """The daemon knows the steps before this one."""
        self.rows = _between(self.runs, step, WHOLE_MAX)

    def _compress(self) -> None:
        if self.uncompressed:
            self.rows, self.uncompressed = compressed([*self.rows, *runs_of(self.uncompressed)]), []


def _between(runs: Sequence[Run], first: int, end: int) -> list[Run]:
    return [part for run in runs if (part := run.between(first, end)) is not None]


class SampleUsage:
    """Advances the sampler with the steps, and keeps what they use until the daemon knows it."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self._generation = 0
        self._finished: Sequence[Use] = ()
        """The usage of a finished step that is not committed yet."""
        self._worlds: dict[int, WorldUsage] = {}

    def enter(self, generation: int, begins_at: int) -> None:
        """Another world begins after so many steps."""
        self._generation, self._finished = generation, ()
        self._worlds = {number: usage for number, usage in self._worlds.items() if usage.runs}
        self._worlds.setdefault(generation, WorldUsage(begins_at))

    def finish(self) -> None:
        """A step is finished: the sampler advances with the state."""
        self._finished = self.sampler.advance()

    def commit(self, step: int) -> None:
        """The finished step is committed."""
        usage = self._worlds.get(self._generation)
        if usage is not None:
            usage.add(step, self._finished)
        self._finished = ()

    def unreported(self) -> Iterator[tuple[int, int, list[Run]]]:
        """What the daemon may not know: generation, first step, and rows of whole steps."""
        for generation, usage in sorted(self._worlds.items()):
            for runs in usage.parts():
                yield generation, usage.begins_at, runs

    def worlds(self) -> list[tuple[int, int]]:
        """Generation and first step of each world whose usage the daemon may not know."""
        return [(generation, usage.begins_at) for generation, usage in sorted(self._worlds.items()) if usage.runs]

    def known(self, generation: int, step: int) -> None:
        """The daemon knows this world's usage up to the step."""
        usage = self._worlds.get(generation)
        if usage is None:
            return
        usage.forget_before(step)
        if not usage.rows and generation != self._generation:
            del self._worlds[generation]

    def state_dict(self) -> dict[str, Any]:
        """The unreported usage, which travels with the training state."""
        usage = [(generation, usage.begins_at, usage.runs) for generation, usage in sorted(self._worlds.items())]
        return {"noted": _encode(usage)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the usage of a worker with a higher step, which has all of it or has reported it."""
        self._finished = ()
        for generation, begins_at, runs in _decode(state["noted"]):
            self._worlds[generation] = WorldUsage(begins_at, runs)
