from __future__ import annotations

import pickle

import pytest

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.worker.errors import (
    NEWS_DIFFER,
    CollectiveAborted,
    StepAborted,
    WorkerEvicted,
    WorldIncomplete,
    is_temporary,
)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("daemon_unavailable", "it is away"),
        PeerError("frame_length", "it makes no sense"),
        StepAborted("b is gone"),
        *(RequestRefused(code, "it has not heard the same", "wait") for code in sorted(NEWS_DIFFER)),
    ],
    ids=lambda error: error.code,
)
def test_errors_of_peers_and_of_the_daemon_are_temporary(error: ForgedError) -> None:
    assert is_temporary(error)


@pytest.mark.parametrize(
    "error",
    [RequestRefused("state_unfit", "it is a string", "give a dict"), WorkerEvicted("requested by an operator")],
    ids=lambda error: error.code,
)
def test_local_errors_are_permanent(error: ForgedError) -> None:
    assert not is_temporary(error)


@pytest.mark.parametrize("error", [CollectiveAborted("b is gone", "b"), WorldIncomplete("b has not come", "b")])
def test_pickled_error_keeps_its_peer(error: CollectiveAborted | WorldIncomplete) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), other.peer, str(other), other.code) == (type(error), "b", str(error), error.code)
    assert other.fix == error.fix
