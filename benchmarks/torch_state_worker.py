"""Workers that give and take a model and its optimizer, by `forged.torch` and by a bare socket.

Runs in the peers' environment. Arguments: `give ENDPOINT JOB MIB` trains without end, with a state of so many MiB;
`take ENDPOINT JOB MIB` joins, and writes the seconds from its registration to its first step; `send PORT MIB` and
`receive PORT MIB` do the same over a bare connection, into the same kinds of memory: a third of it was in use before,
as parameters are, and the rest is new, as the moments of an optimizer are that has made no step.
"""

from __future__ import annotations

import mmap
import socket
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

import forged.torch as ft
from forged.elastic.config import ElasticTrainingConfig

HOST = "127.0.0.1"
COLUMNS, LAYERS, PARTS, ITEM_BYTES = 1024, 32, 3, 4
"""AdamW keeps two moments for each parameter."""
PAUSE_S = 0.002
CONFIG = ElasticTrainingConfig(stability_window_ms=0, failure_tolerance_percentage=100)


def rows_of(mib: int) -> int:
    """The rows of each layer, for so many MiB with the optimizer."""
    return max(1, mib * (1 << 20) // (PARTS * LAYERS * COLUMNS * ITEM_BYTES))


def train(endpoint: str, job: str, mib: int, *, is_taker: bool) -> None:
    """Train; a worker that takes the state ends behind its first step."""
    torch.set_num_threads(1)
    rows = rows_of(mib)
    model = torch.nn.ParameterList([torch.zeros(rows, COLUMNS) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    if not is_taker:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    state = ft.State(model=model, optimizer=optimizer, rng=False)
    with ft.join(endpoint, job=job, state=state, config=CONFIG) as run:
        level_memory(mib)
        began_at = time.monotonic()
        for step in run.steps():
            with step:
                if is_taker:
                    entered_at = time.monotonic()
                    break
            say(f"{int(step)}")
            time.sleep(PAUSE_S)
    assert len(optimizer.state) == LAYERS
    say(f"{entered_at - began_at}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def level_memory(mib: int) -> None:
    """Have the machine find memory for so much, which a virtual one may have to get from its host."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, mib << 20, flags=flags).close()


def send(port: int, mib: int) -> None:
    """Send to one connection after the other."""
    parts = [np.ones((rows_of(mib), COLUMNS), np.float32) for _ in range(LAYERS * PARTS)]
    with socket.create_server((HOST, port)) as listener:
        say(str(listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            with connection:
                for part in parts:
                    connection.sendall(part.data)


def receive(port: int, mib: int) -> None:
    """Receive once, and write the seconds."""
    shape = rows_of(mib), COLUMNS
    parts = [np.ones(shape, np.float32) for _ in range(LAYERS)]
    level_memory(mib)
    began_at = time.monotonic()
    parts += [np.empty(shape, np.float32) for _ in range(LAYERS * (PARTS - 1))]
    with socket.create_connection((HOST, port)) as connection:
        for part in parts:
            room = part.data.cast("B")
            while room:
                size = connection.recv_into(room)
                if not size:
                    raise EOFError
                room = room[size:]
    say(str(time.monotonic() - began_at))


def main(arguments: Sequence[str]) -> None:
    """Do one of them."""
    match arguments:
        case ["give" | "take" as what, endpoint, job, mib]:
            train(endpoint, job, int(mib), is_taker=what == "take")
        case ["send", mib]:
            send(0, int(mib))
        case ["receive", port, mib]:
            receive(int(port), int(mib))


if __name__ == "__main__":
    main(sys.argv[1:])
