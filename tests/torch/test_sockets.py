"""Ranks that wait in torch's C++ code for a lost one."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from forged.torch.sockets import GroupSockets

SOON_S = 30.0
TIMEOUT = dt.timedelta(seconds=60)


def begun(act: Callable[[], object]) -> Callable[[], bool]:
    """Begin to act in a thread; returns what tells whether it ends soon."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ends() -> bool:
        thread.join(SOON_S)
        return not thread.is_alive()

    return ends


@pytest.mark.parametrize("port", [1, 65535], ids=["that is connected to", "that is to connect"])
def test_rank_that_waits_for_a_lost_one_while_a_group_is_made_is_released(port: int) -> None:
    """Which of two ranks connects depends on their addresses."""
    store = dist.HashStore()
    sockets = GroupSockets(frozenset(), world_size=2)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    waits_no_longer = begun(lambda: dist.ProcessGroupGloo(store, 0, 2, options))
    store.wait(["0/0"])
    ((_, own_port),) = sockets.listeners()
    # The other rank has told where it listens, and was killed.
    address = store.get("0/0")
    lost = address.replace(own_port.to_bytes(2, "big"), port.to_bytes(2, "big"))
    assert lost != address
    store.set("0/1", lost)
    sockets.shut_down()
    sockets.release_maker()
    assert waits_no_longer()
