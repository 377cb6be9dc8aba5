"""How far a worker is, across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from forged.errors import ForgedError
from forged.worker.process.counters import SIZE, Counters

COUNT_FOR_EVER = """
import sys
from forged.worker.process.counters import SIZE, Counters
import mmap
counters = Counters(int(sys.argv[1]), mmap.PROT_READ | mmap.PROT_WRITE)
number = 0
print(flush=True)
while True:
    number = (number + 1) % 256
    counters.step = int.from_bytes(bytes([number]) * 8, "big")
    counters.marks += 1
"""


def test_reader_sees_the_values_of_the_writer() -> None:
    written = Counters.create()
    read = Counters.attach(os.dup(written.descriptor))
    assert (read.step, read.marks, read.pulse_interval_s) == (0, 0, 0.0)
    written.step, written.marks, written.pulse_interval_s = 7, 2**64 - 1, 0.133
    assert (read.step, read.marks, read.pulse_interval_s) == (7, 2**64 - 1, 0.133)
    read.close()
    written.close()


def test_number_is_written_whole_and_outlives_its_writer() -> None:
    """A process counts with all bytes of a step alike, and is killed in the middle of it."""
    counters = Counters.create()
    command = [sys.executable, "-c", COUNT_FOR_EVER, f"{counters.descriptor}"]
    with subprocess.Popen(command, pass_fds=[counters.descriptor], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen: set[int] = set()
        while len(seen) < 3 and process.poll() is None:
            seen.add(counters.step)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert all(len(set(step.to_bytes(8, "big"))) == 1 for step in seen)
    assert len(seen) == 3
    assert counters.marks > 1
    counters.close()


def test_reader_of_counters_cannot_write() -> None:
    written = Counters.create()
    read = Counters.attach(os.dup(written.descriptor))
    with pytest.raises(TypeError):
        read.step = 1
    read.close()
    written.close()


@pytest.mark.parametrize("number", [-1, 2**64])
def test_invalid_count_is_refused_and_changes_nothing(number: int) -> None:
    counters = Counters.create()
    counters.step = 3
    with pytest.raises(ValueError):
        counters.step = number
    assert counters.step == 3
    counters.close()


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_memory_of_another_size_holds_no_counters(size: int) -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, size)
    with pytest.raises(ForgedError) as error:
        Counters.attach(descriptor)
    assert error.value.code == "counters_invalid"
    os.close(descriptor)


def test_second_close_does_not_close_a_reused_descriptor() -> None:
    counters = Counters.create()
    counters.close()
    taken = os.open(os.devnull, os.O_RDONLY)
    assert taken == counters.descriptor
    counters.close()
    os.fstat(taken)
    os.close(taken)


def test_counters_are_not_inherited_by_started_programs() -> None:
    counters = Counters.create()
    assert not os.get_inheritable(counters.descriptor)
    counters.close()
