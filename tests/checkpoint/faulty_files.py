"""A file system with injected faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from forged.checkpoint.storage.files import Files
from tests.checkpoint.memory_files import MemoryFiles

Act = Callable[..., Any]
Fault = Callable[[int, str, Act], Any]
"""Does what was asked, or what goes wrong instead: given the operation's number, name, and the act itself."""


class ProcessDied(OSError):
    """The process has died; the operation was not requested."""


class FaultyFiles:
    """Passes on what is asked, one operation at a time, through the fault."""

    def __init__(self, files: Files, fault: Fault) -> None:
        self._files = files
        self._fault = fault
        self._lock = threading.Lock()
        self.count = 0

    def __getattr__(self, name: str) -> Act:
        return partial(self._pass_on, name, getattr(self._files, name))

    def _pass_on(self, name: str, act: Act, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            number, self.count = self.count, self.count + 1
        try:
            return self._fault(number, name, partial(act, *args, **kwargs))
        except (InterruptedError, ProcessDied):
            raise
        except OSError:
            if isinstance(self._files, MemoryFiles):
                if name == "sync":
                    self._files.fail_to_sync(*args)
                elif name == "sync_directory":
                    self._files.fail_to_sync_directory(*args)
            raise


def with_fault(files: Files, fault: Fault) -> Files:
    """The same files, with a fault."""
    return cast("Files", FaultyFiles(files, fault))


def failing(operation: str, code: int, times: int | None = None) -> Fault:
    """One kind of operation fails, so often or always. A descriptor is closed all the same."""
    left = [times]

    def fault(number: int, name: str, act: Act) -> Any:
        if name != operation or left[0] == 0:
            return act()
        if left[0] is not None:
            left[0] -= 1
        if name == "close":
            act()
        raise OSError(code, os.strerror(code))

    return fault


class NthFails:
    """Fail the n-th operation of a kind; a `Fault`."""

    def __init__(self, nth: int, operation: str, code: int) -> None:
        self.has_come = False
        self._left = nth
        self._operation = operation
        self._code = code

    def __call__(self, number: int, name: str, act: Act) -> Any:
        if name == self._operation:
            self._left -= 1
            if self._left == -1:
                self.has_come = True
                raise OSError(self._code, os.strerror(self._code))
        return act()


def taking_at_most(count: int) -> Fault:
    """Every write takes so many bytes at most."""

    def fault(number: int, name: str, act: Act) -> Any:
        if name != "write":
            return act()
        assert isinstance(act, partial)
        fd, data, offset = act.args
        return act.func(fd, data[:count], offset) if count else 0

    return fault
