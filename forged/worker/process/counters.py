"""How far a worker is, in memory that another process can read.

Law: one process writes and any may read, without a lock and without a system call. Each number is written whole, so a
reader may see an older one and never half of one. The memory belongs to nobody: it is there as long as somebody has it
open, so what a worker wrote last can be read after it was killed.
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
    """The steps that a worker has committed, and how often it has come to where workers meet; when to say so."""

    def __init__(self, descriptor: int, protection: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, protection)
        # Aligned words in the machine's own order: these are moved whole.
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> Self:
        """New ones, at 0, for the process that counts."""
        descriptor = os.memfd_create("forged-counters", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, SIZE)
            return cls(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int) -> Self:
        """Another process's, to read; the descriptor is theirs from now on."""
        if os.fstat(descriptor).st_size != SIZE:
            raise ForgedError(
                "counters_invalid", f"descriptor {descriptor} does not hold counters", "this is a mistake: report it"
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
        """How often the pulse is to speak; 0 where nobody has said."""
        return self._words[PULSE_INTERVAL] / NS_PER_S

    @pulse_interval_s.setter
    def pulse_interval_s(self, seconds: float) -> None:
        self._words[PULSE_INTERVAL] = round(seconds * NS_PER_S)

    def close(self) -> None:
        """Let go of the memory; once is enough. What others have open stays open."""
        if self._memory.closed:
            return
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)
