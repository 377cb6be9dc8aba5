"""The process groups of one worker, one after the other."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from forged.torch.group import ProcessGroups


@pytest.fixture
def worker() -> Any:
    """A worker with events that do not happen."""
    event = SimpleNamespace(subscribe=lambda act: act, unsubscribe=lambda act: None)
    return SimpleNamespace(world_entered=event, world_over=event)


def test_group_has_the_same_name_whether_the_last_one_was_made_or_not(worker: Any) -> None:
    """The ranks find each other by the name, and the last one may have been made at some of them."""
    groups = ProcessGroups(worker)
    soon = dt.timedelta(milliseconds=50)
    store = dist.HashStore()
    store.set_timeout(soon)
    with groups, pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=soon)
    store = dist.HashStore()
    with groups:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
