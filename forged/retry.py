"""The project's one way to try again.

Law: what is tried again, how often and after which pause is a `RetryPolicy`; nobody writes such a loop elsewhere.
Randomness and sleep are arguments. A cancellation is no failure: it passes through at once.
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
"""Draws from [0, 1): the `random` method of a `random.Random`."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try (None: for ever) and how long to wait in between.

    With `exponential` each pause is twice the one before, up to `delay_max_s`. `jitter` is the fraction of a pause
    that chance may take away, so that many clients do not come back at the same moment and none waits past the limit.
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
        """The pauses between the attempts, in seconds: one fewer than there are attempts."""
        pause_s = self.delay_s
        for _ in repeat(None) if self.attempts is None else repeat(None, self.attempts - 1):
            yield pause_s * (1.0 - self.jitter * random())
            if self.exponential:
                pause_s = min(2.0 * pause_s, self.delay_max_s)


RECONNECTING = RetryPolicy(attempts=None, delay_s=0.1, exponential=True, delay_max_s=3.0, jitter=0.5)
"""For a lost connection: never gives up, and does not storm a daemon that is away for long."""
REJOINING = RetryPolicy(attempts=None, delay_s=0.1, exponential=True, delay_max_s=0.5, jitter=0.5)
"""For a worker and its pulse, who count as dead when they are not back within a grace that a job may set to a second or
two, and that is not known before they have joined."""


def is_retryable(error: Exception) -> bool:
    """Whether the error itself says that the same action may succeed later."""
    return isinstance(error, ForgedError) and error.retryable


async def run(
    policy: RetryPolicy,
    action: Callable[[], Awaitable[Result]],
    *,
    sleep: Callable[[float], Awaitable[None]],
    random: Random,
    retryable: Callable[[Exception], bool] = is_retryable,
) -> Result:
    """Call `action` until it succeeds, fails in a way that is not `retryable`, or fails the last time."""
    for pause_s in policy.delays(random):
        try:
            return await action()
        except Exception as error:
            if not retryable(error):
                raise
        await sleep(pause_s)
    return await action()
