"""Where torchrun's agents meet: a store in a process of its own, so that no agent takes it along when it is killed.

Runs in the peers' environment, without anything of forged.
"""

from __future__ import annotations

import signal

from torch.distributed import TCPStore


def main() -> None:
    """Say at which port, and serve for ever."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
