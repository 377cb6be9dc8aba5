"""Errors of checkpoints."""

from __future__ import annotations

import pickle

import pytest

from forged.checkpoint import CheckpointException, ExceptionType
from forged.errors import ForgedError


def test_an_error_says_which_checkpoint_and_of_which_kind() -> None:
    error = CheckpointException("it is torn", "run/a", ExceptionType.CORRUPTED_CHECKPOINT, fix="use another one")
    assert isinstance(error, ForgedError)
    assert (error.checkpoint_path, error.type) == ("run/a", ExceptionType.CORRUPTED_CHECKPOINT)
    assert (error.code, str(error)) == ("checkpoint_corrupted_checkpoint", "it is torn (use another one)")


def test_an_error_needs_no_more_than_a_message() -> None:
    error = CheckpointException("it failed")
    assert (error.message, error.checkpoint_path, error.type) == ("it failed", "", ExceptionType.UNKNOWN)
    assert not error.retryable


@pytest.mark.parametrize("kind", ExceptionType)
def test_an_error_comes_back_from_another_process_as_it_was(kind: ExceptionType) -> None:
    error = CheckpointException("m", "p", kind, code="c", fix="f", retryable=True, ranks=(2, 0))
    back = pickle.loads(pickle.dumps(error))
    assert vars(back) == vars(error)
    assert (type(back), str(back)) == (CheckpointException, str(error))
