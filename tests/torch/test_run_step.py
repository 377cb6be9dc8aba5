"""What a step of a run makes of exceptions."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from forged.torch.run_step import RunStep, StepHooks
from forged.worker.errors import StepAborted


class VoidStep(int):
    """A step of the worker that is void by whatever has left it."""

    aborted, is_committed, is_entered = True, False, True
    error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


@pytest.mark.parametrize("text", ["", "the script says so\nin two lines"])
def test_exception_that_a_collective_has_caused_voids_the_step_whatever_its_text_is(text: str) -> None:
    inner = VoidStep(3)
    hooks = StepHooks(lambda: None, lambda step, error: None, lambda: None)
    with RunStep.of(inner, hooks, 3):  # type: ignore[arg-type]
        raise ValueError(text) from dist.DistNetworkError("connection lost")
    assert isinstance(inner.error, StepAborted)
