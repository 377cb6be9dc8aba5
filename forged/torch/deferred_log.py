"""What a script logs with tensors of devices, which are converted seldom: each conversion waits for the device.

Invariants:
- Tensors of the CPU and numbers are passed on at once; tensors of devices at most once a second, with one wait for all.
- Each value is passed on with its step, in order, so that one that is not finite is found in the step it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forged.worker.metrics_report import REPORT_EVERY_S

WAITING_MAX = 4096
"""How many tensors may wait to be converted; more are converted earlier."""


class DeferredLog:
    """Logged values of one run; `log` takes the step and the values as numbers."""

    def __init__(self, log: Callable[..., object]) -> None:
        self._log = log
        self._waiting: list[tuple[int, str, torch.Tensor]] = []
        self._converted_at: float | None = None

    def add(self, step: int, values: dict[str, Any], now: float) -> None:
        """Log values of a step at a time in seconds."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu and value.numel() == 1:
                # A copy: the script may change the tensor in place.
                self._waiting.append((step, name, value.detach().clone().reshape(()).double()))
            else:
                self._log(step, **{name: value})
        is_due = self._converted_at is None or now - self._converted_at >= REPORT_EVERY_S
        if self._waiting and (is_due or len(self._waiting) >= WAITING_MAX):
            self._converted_at = now
            self.flush()

    def flush(self) -> None:
        """Convert what waits, with one wait for each device."""
        waiting, self._waiting = self._waiting, []
        devices = dict.fromkeys(tensor.device for _, _, tensor in waiting)
        for device in devices:
            of_device = [entry for entry in waiting if entry[2].device == device]
            numbers = torch.stack([tensor for _, _, tensor in of_device]).tolist()
            for (step, name, _), number in zip(of_device, numbers, strict=True):
                self._log(step, **{name: number})
