"""The Python stacks of a process, which its pulse can have written at any time.

A real-time signal makes `faulthandler` write them in C, in the signal's handler: also while the script hangs in C code
with the GIL held, and with no help of Python code.

Invariants:
- The signal is one that nothing in the process handles, ignores or blocks; without such a one no stacks can be had.
- It is sent only while the process has a handler for it, whose default action would end the process.
- The stacks are in memory that both processes have open; `STACKS_BYTES_MAX` of them are read.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from typing import Self

STACKS_BYTES_MAX = 64 << 10
CANDIDATES = range(signal.SIGRTMAX - 9, signal.SIGRTMAX - 1)
"""Not the first ones, which libraries take, nor the last."""
STATUS_BYTES_MAX = 1 << 14
_MASKS = re.compile(rb"^(Sig(?:Cgt|Ign|Blk)):\s*([0-9a-f]+)$", re.MULTILINE)


class StackDump:
    """The stacks of this process, for its pulse."""

    def __init__(self, descriptor: int, status: int, number: int) -> None:
        self.descriptor = descriptor
        """Shared memory for the text."""
        self.status = status
        """The open `/proc/PID/status` of the process."""
        self.number = number
        """The signal; 0 if there is none."""

    @classmethod
    def create(cls) -> Self:
        """Handle a free signal from now on."""
        descriptor = os.memfd_create("forged-stacks", os.MFD_CLOEXEC)
        try:
            status = os.open(f"/proc/{os.getpid()}/status", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(descriptor)
            raise
        used = _used_signals(status)
        number = next((one for one in CANDIDATES if not is_in(one, used)), 0)
        if number:
            faulthandler.register(number, descriptor, all_threads=True)
        return cls(descriptor, status, number)

    def close(self) -> None:
        """Handle the signal no more. Idempotent; the pulse has ended before."""
        if self.descriptor < 0:
            return
        if self.number:
            faulthandler.unregister(self.number)
        os.close(self.descriptor)
        os.close(self.status)
        self.descriptor = -1


def _used_signals(status: int) -> int:
    """The signals that are handled, ignored or blocked, as a mask."""
    used = 0
    for _, mask in _MASKS.findall(os.pread(status, STATUS_BYTES_MAX, 0)):
        used |= int(mask, 16)
    return used


def handles(status: int, number: int) -> bool:
    """Whether the process with this open status file has a handler for a signal."""
    try:
        masks = dict(_MASKS.findall(os.pread(status, STATUS_BYTES_MAX, 0)))
    except OSError:
        return False
    return is_in(number, int(masks.get(b"SigCgt", b"0"), 16))


def is_in(number: int, mask: int) -> bool:
    return bool(mask >> (number - 1) & 1)
