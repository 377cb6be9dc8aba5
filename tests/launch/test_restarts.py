"""Which workers are started again."""

from __future__ import annotations

import pytest

from forged.launch.restarts import Finished, Restart, RestartHistory, RestartLimits, RestartPolicy, in_words

LASTING_S = 60.0


def history(policy: RestartPolicy = RestartPolicy.ON_FAILURE, restarts_max: int = 3) -> RestartHistory:
    return RestartHistory(RestartLimits(policy, restarts_max, LASTING_S, pause_s=1.0, pause_max_s=3.0))


def test_pauses_grow_to_their_limit_and_restarts_in_a_row_end() -> None:
    worker = history(restarts_max=4)
    decisions = [worker.ended(1, 0.1, job_is_over=False) for _ in range(5)]
    assert decisions[:4] == [Restart(1.0), Restart(2.0), Restart(3.0), Restart(3.0)]
    assert decisions[4] == Finished("ended with exit code 1 after it was restarted 4 times without running for 60 s")
    assert worker.restarts == 4


def test_worker_that_ran_long_starts_at_once_and_counts_anew() -> None:
    worker = history(restarts_max=1)
    for _ in range(5):
        assert worker.ended(-9, LASTING_S, job_is_over=False) == Restart(0.0)
    assert isinstance(worker.ended(-9, 1.0, job_is_over=False), Finished)
    assert worker.restarts == 5


@pytest.mark.parametrize(
    ("policy", "code", "decision"),
    [
        (RestartPolicy.NEVER, 1, Finished("ended with exit code 1")),
        (RestartPolicy.NEVER, 0, Finished()),
        (RestartPolicy.ON_FAILURE, 0, Finished()),
        (RestartPolicy.ON_FAILURE, -9, Restart(1.0)),
        (RestartPolicy.ALWAYS, 0, Restart(1.0)),
    ],
)
def test_policy_decides(policy: RestartPolicy, code: int, decision: object) -> None:
    assert history(policy).ended(code, 0.1, job_is_over=False) == decision


@pytest.mark.parametrize("policy", RestartPolicy)
def test_no_worker_starts_for_a_job_that_is_over(policy: RestartPolicy) -> None:
    assert history(policy).ended(1, 0.1, job_is_over=True) == Finished("ended with exit code 1")
    assert history(policy).ended(0, 0.1, job_is_over=True) == Finished()


def test_without_restarts_the_first_failure_is_told_as_it_is() -> None:
    assert history(restarts_max=0).ended(3, 0.1, job_is_over=False) == Finished("ended with exit code 3")


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")]
)
def test_exit_code_is_told_in_words(code: int, words: str) -> None:
    assert in_words(code) == words
