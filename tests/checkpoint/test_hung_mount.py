"""A directory on a mount whose server does not answer: calls end at their deadline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import ctypes, os, sys

CLONE_NEWNS, MS_REC, MS_PRIVATE, UNSUPPORTED = 0x20000, 0x4000, 0x40000, 77
libc, where = ctypes.CDLL(None, use_errno=True), sys.argv[2]

def required(result):
    if result != 0:
        print(os.strerror(ctypes.get_errno()))
        os._exit(UNSUPPORTED)

# The mount is one of this process alone, and ends with it. Nothing reads the requests from its server's end.
required(libc.unshare(CLONE_NEWNS))
required(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
try:
    server = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    print(error)
    os._exit(UNSUPPORTED)
options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
required(libc.mount(b"hung", where.encode(), b"fuse", 0, options.encode()))

import asyncio
import forged.checkpoint as checkpoint
from forged.checkpoint import thread_calls

thread_calls.RETURN_GRACE_S = 0.1
storage = checkpoint.create_storage(checkpoint.StorageOptions("local", {"base_path": where}))
distributed = checkpoint.DistributedCheckpoint(storage=storage, default_timeout=0.2)
calls = {
    "save": lambda: checkpoint.save(f"{where}/a", {"step": 1}, timeout=0.2),
    "load": lambda: checkpoint.load(f"{where}/a", timeout=0.2),
    "resume": lambda: checkpoint.Checkpoints(where, timeout=0.2).resume({}),
    "load with an event loop": lambda: asyncio.run(
        distributed.load(options=checkpoint.LoadOptions("a"))
    ),
}
try:
    calls[sys.argv[1]]()
except checkpoint.CheckpointException as error:
    print(error.type.name, flush=True)
# The threads in the mount cannot be joined.
os._exit(0)
"""
UNSUPPORTED = 77
ENDS_WITHIN_S = 60


@pytest.mark.parametrize("call", ["save", "load", "resume", "load with an event loop"])
def test_call_ends_at_its_deadline(tmp_path: Path, call: str) -> None:
    command = [sys.executable, "-c", CALL, call, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False)
    if done.returncode == UNSUPPORTED:
        pytest.skip(f"this process may not mount: {done.stdout}")
    assert done.stdout == "TIMEOUT\n", done.stderr
