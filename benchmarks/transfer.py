"""Shards from one worker's directory to another's, over loopback TCP, against bare blocking sockets and rsync.

Ours is all of it: peers that prove who they are, a schedule, checksums, files that are durable when they count. The
bare reference has connections that are open already, sends each file with `sendfile`, writes what it receives, and
checks nothing. On /dev/shm nothing has to wait for a disk; the rows for a disk sync each file, the reference as well.
Sources are in the page cache, destinations are new files for both, and subject and reference take turns of 4 GiB. Where
memory that was freed goes back to a host, it is slow to touch again: before each turn so much is taken and freed that
neither finds more of the fast kind than the other.

rsync takes one file after the other, and compares checksums, too.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.harness import Figure, interleaved, main
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor
from forged.data.store.directory import DirectoryShardStore
from forged.data.transfer.manager import DataTransferManager
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId
from forged.worker.mesh import Mesh

GIB, MIB = 1 << 30, 1 << 20
SHARD_BYTES, SHARDS, ROUNDS = 64 * MIB, 64, 5
QUICK_SHARD_BYTES, QUICK_SHARDS, QUICK_ROUNDS = 8 * MIB, 8, 1
FILL = os.urandom(MIB)
REFERENCE_BUFFER_BYTES = MIB
BARE_AIM, RSYNC_AIM = 0.85, 1.0
SHARED_MEMORY, DISK = Path("/dev/shm"), Path("/var/tmp")
UNIT = "GiB/s"
KEY = b"the key of a job that is measured"
RSYNC = shutil.which("rsync")


@dataclass(frozen=True)
class Scene:
    """Where the shards lie, where they go, and who gives them."""

    held: DirectoryShardStore
    room: Path
    worker: WorkerId
    bare: tuple[str, int]
    is_synced: bool

    @property
    def size_bytes(self) -> int:
        """That of all shards."""
        return sum(stamp.size for stamp in self.held.held().values())

    def files(self) -> list[Path]:
        """Those of all shards."""
        return [self.held.path_of(shard) for shard in sorted(self.held.held())]

    @contextmanager
    def new_directory(self) -> Iterator[Path]:
        """An empty one, which is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.room) as path:
            yield Path(path)


@contextmanager
def scene(room: Path, shards: int, shard_bytes: int, *, is_synced: bool) -> Iterator[Scene]:
    """A directory of shards, and a process that gives them in both ways."""
    with tempfile.TemporaryDirectory(dir=room) as path:
        held = DirectoryShardStore(Path(path) / "source")
        for shard in range(shards):
            held.put(shard, (FILL for _ in range(shard_bytes // len(FILL))))
        near, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_give, args=(held, far))
        process.start()
        worker, bare = near.recv()
        try:
            yield Scene(held, Path(path), worker, bare, is_synced)
        finally:
            near.send(None)
            process.join()


def _give(held: DirectoryShardStore, door: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept_bare, args=(listener, held), daemon=True).start()
        asyncio.run(_give_shards(held, door, listener.getsockname()))


async def _give_shards(held: DirectoryShardStore, door: Connection, bare: tuple[str, int]) -> None:
    mesh = Mesh("giver", bytes(16), "bench", key=KEY)
    mesh.serve_shards(held)
    async with mesh.open() as address:
        door.send((WorkerId("giver", address.host, address.port), bare))
        await asyncio.get_running_loop().run_in_executor(None, door.recv)


def _accept_bare(listener: socket.socket, held: DirectoryShardStore) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_give_bare, args=(sock, held), daemon=True).start()


def _give_bare(sock: socket.socket, held: DirectoryShardStore) -> None:
    with sock:
        while wish := sock.recv(8):
            with held.path_of(int.from_bytes(wish, "big")).open("rb") as file:
                size, sent = os.fstat(file.fileno()).st_size, 0
                while sent < size:
                    sent += os.sendfile(sock.fileno(), file.fileno(), sent, size - sent)


def ours(made: Scene, concurrency: int) -> float:
    """The rate of a manager that fetches all shards."""
    _level_memory(made)
    with made.new_directory() as path:
        return asyncio.run(_fetch(made, path, concurrency))


async def _fetch(made: Scene, path: Path, concurrency: int) -> float:
    store, mesh = DirectoryShardStore(path), Mesh("taker", bytes(16), "bench", key=KEY)
    async with mesh.open() as address:
        taker = WorkerId("taker", address.host, address.port)
        manager = DataTransferManager(concurrency, worker=taker, store=store, connect=mesh.connect_for_shards)
        plan = _all_from(made, taker)
        start = time.monotonic()
        report = await manager.execute_plan(plan)
        elapsed_s = time.monotonic() - start
    report.require_complete()
    return made.size_bytes / GIB / elapsed_s


def _level_memory(made: Scene) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, made.size_bytes, flags=flags).close()


def _all_from(made: Scene, taker: WorkerId) -> DataRedistributionPlan:
    """Everything moves, as its holder leaves."""
    shards = len(made.held.held())
    before, after = ClusterTopology((made.worker,)), ClusterTopology((taker,))
    redistributor = DataRedistributor(ElasticTrainingConfig())
    return redistributor.calculate_plan(before, after, shards, shards=shards, draining=[made.worker])


def bare(made: Scene, concurrency: int) -> float:
    """The rate of as many bare connections."""
    _level_memory(made)
    wishes: SimpleQueue[int] = SimpleQueue()
    for shard in made.held.held():
        wishes.put(shard)
    with made.new_directory() as path, ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(made.bare)) for _ in range(concurrency)]
        threads = [threading.Thread(target=_take_bare, args=(sock, made, wishes, path)) for sock in socks]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made.size_bytes / GIB / (time.monotonic() - start)


def _take_bare(sock: socket.socket, made: Scene, wishes: SimpleQueue[int], path: Path) -> None:
    buffer = memoryview(bytearray(REFERENCE_BUFFER_BYTES))
    while True:
        try:
            shard = wishes.get_nowait()
        except Empty:
            return
        sock.sendall(shard.to_bytes(8, "big"))
        left = made.held.held()[shard].size
        with (path / str(shard)).open("wb", buffering=0) as file:
            while left:
                size = sock.recv_into(buffer[:left])
                file.write(buffer[:size])
                left -= size
            if made.is_synced:
                os.fsync(file.fileno())


def rsync(made: Scene) -> float:
    """The rate of a daemon and a client of rsync, which sends whole files, as there are none to compare with."""
    assert RSYNC is not None
    _level_memory(made)
    with made.new_directory() as path, _rsync_daemon(made) as url:
        start = time.monotonic()
        subprocess.run([RSYNC, "--whole-file", "--recursive", url, f"{path}/"], check=True)
        return made.size_bytes / GIB / (time.monotonic() - start)


@contextmanager
def _rsync_daemon(made: Scene) -> Iterator[str]:
    with made.new_directory() as path, socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
        reserved.close()
        config = path / "rsyncd.conf"
        config.write_text(f"use chroot = no\n[shards]\npath = {made.held.path}\nread only = yes\nuid = 0\ngid = 0\n")
        command = [str(RSYNC), "--daemon", "--no-detach", "--address=127.0.0.1", f"--port={port}", f"--config={config}"]
        with subprocess.Popen(command) as daemon:
            try:
                _wait_for(port, daemon)
                yield f"rsync://127.0.0.1:{port}/shards/"
            finally:
                daemon.terminate()


def _wait_for(port: int, daemon: subprocess.Popen[bytes]) -> None:
    while daemon.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise SystemExit(f"rsync's daemon ended with {daemon.returncode}")


def compare(
    name: str, made: Scene, rounds: int, concurrency: int, reference: Callable[[], float], aim: float
) -> Figure:
    """Ours and a reference in turn."""
    medians = interleaved(rounds, {"ours": lambda: ours(made, concurrency), "reference": reference})
    return Figure(name, UNIT, medians["ours"], medians["reference"], aim)


def measure(quick: bool) -> list[Figure]:
    """All rows; without rsync its rows have ours only."""
    shards, shard_bytes, rounds = (
        (QUICK_SHARDS, QUICK_SHARD_BYTES, QUICK_ROUNDS) if quick else (SHARDS, SHARD_BYTES, ROUNDS)
    )
    figures = []
    for room, is_synced in ((SHARED_MEMORY, False), (DISK, True)):
        where = f"{room}, synced" if is_synced else str(room)
        with scene(room, shards, shard_bytes, is_synced=is_synced) as made:
            for concurrency in (1, 4):
                name = f"{concurrency} at a time, {where}, bare sockets"
                figures.append(compare(name, made, rounds, concurrency, partial(bare, made, concurrency), BARE_AIM))
                if not is_synced:
                    figures.append(_against_rsync(made, rounds, concurrency))
    return figures


def _against_rsync(made: Scene, rounds: int, concurrency: int) -> Figure:
    name = f"{concurrency} at a time, {made.room.parent}, rsync"
    if RSYNC is None:
        return Figure(f"{name} (not installed)", UNIT, ours(made, concurrency))
    return compare(name, made, rounds, concurrency, lambda: rsync(made), RSYNC_AIM)


if __name__ == "__main__":
    main("transfer", measure)
