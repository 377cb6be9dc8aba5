"""The refusals of the memory service; those of a single device's blocks are in `forged.memory.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from forged.errors import RequestRefused, Unavailable
from forged.memory.errors import argument_invalid

NAME_CHARS_MAX = 256
CONTENT_CHARS_MAX = 1024
NAMED_MAX = 20
"""So many blocks a refusal names."""


def worker_gone(job: str, worker_id: str) -> RequestRefused:
    text = f"worker {worker_id[:NAME_CHARS_MAX]!r} is not registered with job {job} as this process"
    return RequestRefused("worker_gone", text, "start a new process")


def device_unknown(job: str, device: str) -> RequestRefused:
    text = f"job {job} has no device {device[:NAME_CHARS_MAX]!r}"
    return RequestRefused("memory_device_unknown", text, "see ListDevices; a device goes with its worker")


def device_of_another(device: str, worker_id: str) -> RequestRefused:
    text = f"device {device} is not one of worker {worker_id}, and its offsets are planned by its owner"
    return RequestRefused("memory_device_of_another", text, "plan the offsets of a device of your own")


def device_changed(device: str, total: int, given: int, blocks: int) -> RequestRefused:
    text = f"device {device} has {total} bytes and {blocks} blocks; it cannot get {given} bytes"
    return RequestRefused("memory_device_changed", text, "free its blocks first")


def devices_full(shortage: str) -> Unavailable:
    return Unavailable("memory_devices_full", shortage, "raise memory_devices_max or principal_memory_devices_max")


def blocks_full(shortage: str) -> Unavailable:
    return Unavailable(
        "memory_blocks_full", shortage, "free blocks, or raise memory_blocks_max or principal_memory_blocks_max"
    )


def waiting_full(shortage: str) -> Unavailable:
    return Unavailable("memory_waiting_full", shortage, "wait in fewer requests; a batch waits as one")


def asserting(device: str, seconds: float) -> Unavailable:
    text = f"the daemon has restarted, and the owners of blocks on {device} have {seconds:.1f} s left to assert them"
    return Unavailable("memory_asserting", text, "try again, or give the request a wait_s")


def stopping() -> Unavailable:
    return Unavailable("memory_stopping", "the daemon stops, and no request waits for memory any more", "try again")


def name_taken(name: str, size: int, wanted: int) -> RequestRefused:
    text = f"there is a block {name!r} of {size} bytes already, or of another tensor; {wanted} bytes are wanted"
    return RequestRefused("memory_name_taken", text, "free it first, or choose another name")


def assertion_refused(device: str, reasons: Sequence[str]) -> RequestRefused:
    more = f"; and {len(reasons) - NAMED_MAX} more" if len(reasons) > NAMED_MAX else ""
    text = f"blocks of device {device} are not those that are asserted: {'; '.join(reasons[:NAMED_MAX])}{more}"
    return RequestRefused("memory_assertion_refused", text, "drop these blocks, and assert the others again")


def owner_differs(number: int, owner: str) -> RequestRefused:
    text = f"move {number} is of a block of worker {owner}"
    return RequestRefused("memory_move_of_another", text, "only its owner copies and commits it")


def hole_impossible(device: str, hole: int) -> RequestRefused:
    text = f"no moves within the bounds open a hole of {hole} bytes on {device}"
    return RequestRefused("memory_plan_impossible", text, "ask for a smaller hole, or raise bytes_max or moves_max")


def too_many_blocks(device: str, blocks: int, most: int) -> RequestRefused:
    text = f"{device} has {blocks} blocks; compaction is planned for at most {most}"
    return RequestRefused("memory_plan_too_large", text, "free blocks, or allocate fewer and larger ones")


def planning_busy(device: str) -> Unavailable:
    text = f"compaction of {device} is not planned now: other plans have taken the time that there is for them"
    return Unavailable("memory_planning_busy", text, "try again in a second")


def fit_busy(job: str) -> Unavailable:
    text = f"no hole is large enough, and what job {job} has asked before has taken the time for further searches"
    return Unavailable("memory_fit_busy", text, "try again in a second")


def require_name(name: str, value: str) -> None:
    if not (value and len(value) <= NAME_CHARS_MAX and value.isprintable()):
        raise argument_invalid(name, value, f"1 to {NAME_CHARS_MAX} printable characters")


def require_between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise argument_invalid(name, value, f"{low} to {high}")
