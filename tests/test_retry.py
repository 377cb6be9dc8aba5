from __future__ import annotations

import asyncio
import math
import random as randomness
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.retry import RECONNECTING, REJOINING, RetryPolicy, is_retryable, run

POLICIES = st.builds(
    lambda attempts, delay_s, more_s, exponential, jitter: RetryPolicy(
        attempts, delay_s, exponential, delay_s + more_s, jitter
    ),
    attempts=st.none() | st.integers(1, 50),
    delay_s=st.floats(0.001, 100.0),
    more_s=st.floats(0.0, 100.0),
    exponential=st.booleans(),
    jitter=st.floats(0.0, 1.0),
)


def no_luck() -> float:
    return 0.0


class Script:
    """An action that raises these errors in turn and then succeeds; records the pauses."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.pauses: list[float] = []

    async def action(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)


def passing(text: str = "gone") -> Unavailable:
    return Unavailable("gone", text)


def keys(error: ConfigError) -> list[str]:
    return [problem.key for problem in error.problems]


def test_by_default_three_attempts_are_one_second_apart_and_growing_pauses_end_at_30_s() -> None:
    assert list(RetryPolicy().delays(no_luck)) == [1.0, 1.0]
    assert max(RetryPolicy(attempts=8, exponential=True).delays(no_luck)) == 30.0


def test_one_attempt_has_no_pause() -> None:
    assert list(RetryPolicy(attempts=1).delays(no_luck)) == []


def test_exponential_pauses_double_up_to_the_limit() -> None:
    policy = RetryPolicy(attempts=8, exponential=True)
    assert list(policy.delays(no_luck)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_endless_pauses_stay_at_the_limit() -> None:
    policy = RetryPolicy(attempts=None, exponential=True)
    assert list(islice(policy.delays(no_luck), 5000))[-1] == 30.0


def test_each_call_of_delays_starts_from_the_first_pause() -> None:
    policy = RetryPolicy(attempts=3, exponential=True)
    assert list(policy.delays(no_luck)) == list(policy.delays(no_luck))


@pytest.mark.parametrize(("drawn", "pause_s"), [(0.0, 10.0), (0.5, 7.5), (0.999, 5.005)])
def test_jitter_takes_away_at_most_its_fraction(drawn: float, pause_s: float) -> None:
    policy = RetryPolicy(attempts=2, delay_s=10.0, jitter=0.5)
    assert list(policy.delays(lambda: drawn)) == [pytest.approx(pause_s)]


def test_jitter_does_not_shrink_the_pauses_that_follow() -> None:
    policy = RetryPolicy(attempts=4, exponential=True, jitter=0.5)
    assert list(policy.delays(lambda: 0.5)) == [0.75, 1.5, 3.0]


@given(policy=POLICIES, seed=st.integers())
def test_every_pause_is_within_the_jitter_of_its_base_and_within_the_limit(policy: RetryPolicy, seed: int) -> None:
    bases = islice(policy.delays(no_luck), 60)
    pauses = islice(policy.delays(randomness.Random(seed).random), 60)
    for base, pause in zip(bases, pauses, strict=True):
        assert base * (1 - policy.jitter) <= pause <= base <= policy.delay_max_s


@given(policy=POLICIES, seed=st.integers())
def test_the_same_seed_gives_the_same_pauses(policy: RetryPolicy, seed: int) -> None:
    first, second = (list(islice(policy.delays(randomness.Random(seed).random), 60)) for _ in range(2))
    assert first == second


@given(policy=POLICIES)
def test_there_is_one_pause_fewer_than_attempts(policy: RetryPolicy) -> None:
    expected = 60 if policy.attempts is None else policy.attempts - 1
    assert len(list(islice(policy.delays(no_luck), 60))) == expected


@pytest.mark.parametrize("attempts", [0, -1])
def test_attempts_below_one_are_refused(attempts: int) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(attempts=attempts)
    assert keys(caught.value) == ["attempts"]


@pytest.mark.parametrize("delay_s", [-1.0, math.nan, math.inf])
def test_invalid_delay_is_refused(delay_s: float) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(delay_s=delay_s)
    assert keys(caught.value) == ["delay_s"]


@pytest.mark.parametrize("delay_max_s", [-1.0, math.nan, math.inf, 0.5])
def test_limit_that_is_invalid_or_below_the_delay_is_refused(delay_max_s: float) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(delay_max_s=delay_max_s)
    assert keys(caught.value) == ["delay_max_s"]


@pytest.mark.parametrize("jitter", [-0.1, 1.1, math.nan])
def test_jitter_outside_0_to_1_is_refused(jitter: float) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(jitter=jitter)
    assert keys(caught.value) == ["jitter"]


def test_an_endless_loop_without_a_pause_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(attempts=None, delay_s=0.0)
    assert keys(caught.value) == ["delay_s"]


def test_a_few_attempts_may_follow_each_other_at_once() -> None:
    assert list(RetryPolicy(delay_s=0.0, exponential=True).delays(no_luck)) == [0.0, 0.0]


def test_all_bad_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(attempts=0, delay_s=-1.0, delay_max_s=-1.0, jitter=2.0)
    assert keys(caught.value) == ["attempts", "delay_s", "delay_max_s", "jitter"]
    assert [key in str(caught.value) for key in keys(caught.value)] == [True] * 4


@pytest.mark.parametrize(("policy", "grace_s"), [(RECONNECTING, 15.0), (REJOINING, 2.0)], ids=["client", "worker"])
def test_reconnecting_never_ends_and_tries_several_times_within_the_grace_period(
    policy: RetryPolicy, grace_s: float
) -> None:
    """Also after a long outage, when the pauses have their maximum."""
    assert policy.attempts is None
    pauses = list(islice(policy.delays(no_luck), 30))
    assert sum(pauses[-4:]) <= grace_s


def test_unavailable_is_retryable_and_refused_is_not() -> None:
    assert is_retryable(passing())
    assert not is_retryable(RequestRefused("no", "no"))
    assert not is_retryable(ForgedError("broken", "broken"))
    assert not is_retryable(OSError())


async def test_a_success_is_returned_without_a_pause() -> None:
    script = Script()
    assert await run(RetryPolicy(), script.action, sleep=script.sleep, random=no_luck) == "done"
    assert (script.calls, script.pauses) == (1, [])


async def test_retryable_error_is_retried_after_each_pause() -> None:
    script = Script(passing(), passing())
    policy = RetryPolicy(exponential=True)
    assert await run(policy, script.action, sleep=script.sleep, random=no_luck) == "done"
    assert (script.calls, script.pauses) == (3, [1.0, 2.0])


async def test_after_the_last_attempt_its_error_is_raised_as_it_is() -> None:
    errors = [passing("1"), passing("2"), passing("3")]
    script = Script(*errors)
    with pytest.raises(Unavailable) as caught:
        await run(RetryPolicy(), script.action, sleep=script.sleep, random=no_luck)
    assert caught.value is errors[-1]
    assert caught.value.__context__ is None
    assert (script.calls, script.pauses) == (3, [1.0, 1.0])


async def test_one_attempt_raises_the_first_error() -> None:
    script = Script(passing())
    with pytest.raises(Unavailable):
        await run(RetryPolicy(attempts=1), script.action, sleep=script.sleep, random=no_luck)
    assert script.pauses == []


@pytest.mark.parametrize("error", [RequestRefused("no", "no"), OSError(), ForgedError("broken", "broken")])
async def test_error_that_is_not_retryable_is_raised_at_once(error: Exception) -> None:
    script = Script(error)
    with pytest.raises(type(error)) as caught:
        await run(RetryPolicy(), script.action, sleep=script.sleep, random=no_luck)
    assert caught.value is error
    assert (script.calls, script.pauses) == (1, [])


async def test_caller_can_define_retryable_errors() -> None:
    script = Script(OSError())

    def is_os_error(error: Exception) -> bool:
        return isinstance(error, OSError)

    result = await run(RetryPolicy(), script.action, sleep=script.sleep, random=no_luck, retryable=is_os_error)
    assert (result, script.calls) == ("done", 2)


async def test_unlimited_attempts_continue_until_success() -> None:
    script = Script(*(passing() for _ in range(1000)))
    assert await run(RECONNECTING, script.action, sleep=script.sleep, random=no_luck) == "done"
    assert script.calls == 1001


async def test_cancelled_action_is_not_retried_even_if_all_errors_are_retryable() -> None:
    script = Script(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await run(RetryPolicy(), script.action, sleep=script.sleep, random=no_luck, retryable=lambda _: True)
    assert script.calls == 1


async def test_a_cancellation_during_the_pause_ends_it() -> None:
    script = Script(passing())
    asleep = asyncio.Event()

    async def sleep_for_ever(_: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(run(RetryPolicy(), script.action, sleep=sleep_for_ever, random=no_luck))
    await asleep.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == 1
