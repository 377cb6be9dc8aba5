"""Retries: `RetryPolicy` (how often, which pauses), `is_retryable` (which errors), `run` (the loop).

Each caller has its policy next to its use, for example `forged/client/connector.py` and
`forged/worker/registration.py`.

Invariants:
- Randomness and sleep are arguments.
- A cancellation is not a failure: it is raised at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

from forged.errors import ConfigError, ForgedError, Problem

Result = TypeVar("Result")
Random = Callable[[], float]
"""Returns a float in [0, 1): the `random` method of a `random.Random`."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts (None: unlimited) and the pauses between them.

    With `exponential` each pause is twice the previous one, up to `delay_max_s`. A random fraction of up to `jitter` is
    subtracted from each pause, so that many clients do not retry at the same moment.
    """

    attempts: int | None = 3
    delay_s: float = 1.0
    exponential: bool = False
    delay_max_s: float = 30.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        problems = tuple(self._problems())
        if problems:
            raise ConfigError("retry_policy_invalid", "the retry policy is not valid", problems=problems)

    def _problems(self) -> Iterator[Problem]:
        if self.attempts is not None and self.attempts < 1:
            yield Problem("attempts", self.attempts, "at least 1, or None to try for ever")
        if not 0.0 <= self.delay_s < math.inf:
            yield Problem("delay_s", self.delay_s, "0 or more seconds")
        elif self.attempts is None and self.delay_s == 0.0:
            yield Problem("delay_s", self.delay_s, "more than 0 seconds when attempts never end")
        if not 0.0 <= self.delay_max_s < math.inf:
            yield Problem("delay_max_s", self.delay_max_s, "0 or more seconds")
        elif self.delay_max_s < self.delay_s < math.inf:
            yield Problem("delay_max_s", self.delay_max_s, f"at least delay_s, which is {self.delay_s}")
        if not 0.0 <= self.jitter <= 1.0:
            yield Problem("jitter", self.jitter, "a fraction from 0 to 1")

    def delays(self, random: Random) -> Iterator[float]:
        """The pauses between attempts in seconds; one fewer than attempts."""
        pause_s = self.delay_s
        for _ in repeat(None) if self.attempts is None else repeat(None, self.attempts - 1):
            yield pause_s * (1.0 - self.jitter * random()) if self.jitter else pause_s
            if self.exponential:
                pause_s = min(2.0 * pause_s, self.delay_max_s)


RECONNECTING = RetryPolicy(attempts=None, delay_s=0.1, exponential=True, delay_max_s=3.0, jitter=0.5)
"""For a lost connection: unlimited, with pauses that grow while the daemon is down."""
REJOINING = RetryPolicy(attempts=None, delay_s=0.1, exponential=True, delay_max_s=0.5, jitter=0.5)
"""For a worker and its pulse, which count as failed after `reconnect_grace_ms`: a job may set that to a second, and the
worker does not know it before it has joined."""


def is_retryable(error: Exception) -> bool:
    """Whether the error is a `ForgedError` that allows a retry of the same action."""
    return isinstance(error, ForgedError) and error.retryable


async def run(
    policy: RetryPolicy,
    action: Callable[[], Awaitable[Result]],
    *,
    sleep: Callable[[float], Awaitable[None]],
    random: Random,
    retryable: Callable[[Exception], bool] = is_retryable,
) -> Result:
    """Call `action` until it succeeds, raises an error that is not `retryable`, or the last attempt fails."""
    for pause_s in policy.delays(random):
        try:
            return await action()
        except Exception as error:
            if not retryable(error):
                raise
        await sleep(pause_s)
    return await action()
