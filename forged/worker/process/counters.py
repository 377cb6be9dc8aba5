"""A worker's progress counters, in memory that its pulse process can read.

Invariants:
- One process writes and any process may read, without locks and system calls. Each number is written as one word, so a
  reader may see an older number and never half of one.
- The memory exists for as long as any process has it open, so the last numbers can be read after the worker was killed.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

from forged.errors import ForgedError

STEP, MARKS, PULSE_INTERVAL = range(3)
SIZE = 3 * 8
NS_PER_S = 10**9


class Counters:
    """Committed steps, marks (see `CurrentWorld.mark`), and the interval of the pulse."""

    def __init__(self, descriptor: int, protection: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, protection)
        # Aligned words in native byte order are read and written in one access.
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> Self:
        """New counters at 0, for the worker."""
        descriptor = os.memfd_create("forged-counters", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, SIZE)
            return cls(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int) -> Self:
        """Another process's counters, to read; takes over the descriptor."""
        if os.fstat(descriptor).st_size != SIZE:
            raise ForgedError(
                "counters_invalid",
                f"descriptor {descriptor} is not the shared memory of a worker's counters",
                "report this bug",
            )
        return cls(descriptor, mmap.PROT_READ)

    @property
    def step(self) -> int:
        return self._words[STEP]

    @step.setter
    def step(self, step: int) -> None:
        self._words[STEP] = step

    @property
    def marks(self) -> int:
        return self._words[MARKS]

    @marks.setter
    def marks(self, marks: int) -> None:
        self._words[MARKS] = marks

    @property
    def pulse_interval_s(self) -> float:
        """The interval of the pulse's reports; 0 where it was never set."""
        return self._words[PULSE_INTERVAL] / NS_PER_S

    @pulse_interval_s.setter
    def pulse_interval_s(self, seconds: float) -> None:
        self._words[PULSE_INTERVAL] = round(seconds * NS_PER_S)

    def close(self) -> None:
        """Unmap the memory here. Idempotent; other processes keep theirs."""
        if self._memory.closed:
            return
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)
