"""Checks of what workers send: numbers in range, sizes within limits."""

from __future__ import annotations

from forged.elastic.compatibility import check_shared_config
from forged.elastic.config import LEARNING_RATE_MAX
from forged.elastic.messages import INCARNATION_BYTES, JoinJob, ReportStandstill, ReportStopped
from forged.elastic.model import WORLD_SIZE_MAX, check_worker
from forged.errors import RequestRefused
from forged.ids import check_name

ATTRIBUTES_MAX = 64
ATTRIBUTE_CHARS_MAX = 1_000
COLLECTIVE_SEQ_MAX = 2**63 - 1
STEP_MAX = 2**53
STANDSTILL_S_MAX = 366 * 86_400.0
BATCH_MAX = 2**31 - 1
"""With larger numbers, the batch times the world size could not be written to the store."""


def is_countable(step: int, collective_seq: int) -> bool:
    """Whether a heartbeat's numbers are in range; signals have no reply, so invalid ones are ignored."""
    return 0 <= step <= STEP_MAX and 0 <= collective_seq <= COLLECTIVE_SEQ_MAX


def check_step(step: int) -> None:
    _check_range("step", step, STEP_MAX)


def check_stop(request: ReportStopped) -> None:
    _check_range("step", request.step, STEP_MAX)
    _check_range("epoch", request.epoch, STEP_MAX)
    if request.learning_rate is not None:
        _check_range("learning_rate", request.learning_rate, LEARNING_RATE_MAX)
    _check_range("global_batch_size", request.global_batch_size, BATCH_MAX)


def check_standstill(request: ReportStandstill) -> None:
    _check_range("for_s", request.for_s, STANDSTILL_S_MAX, "standstill_invalid")
    if request.peer:
        check_name("peer", request.peer)


def check_join(request: JoinJob) -> None:
    check_worker("worker", request.worker)
    if len(request.incarnation) != INCARNATION_BYTES:
        text = f"incarnation must have {INCARNATION_BYTES} bytes, got {len(request.incarnation)}"
        raise RequestRefused("incarnation_invalid", text, f"draw {INCARNATION_BYTES} random bytes")
    check_shared_config(request.shared_config)
    attributes = request.attributes
    longest = max((len(key) + len(value) for key, value in attributes.items()), default=0)
    if len(attributes) > ATTRIBUTES_MAX or longest > ATTRIBUTE_CHARS_MAX:
        limits = f"at most {ATTRIBUTES_MAX} of at most {ATTRIBUTE_CHARS_MAX} characters"
        text = f"attributes must be {limits}, got {len(attributes)}, the longest with {longest}"
        raise RequestRefused("attributes_invalid", text, "use fewer or shorter attributes")
    if request.local_world_size < 1:
        text = f"local_world_size must be >= 1, got {request.local_world_size}"
        raise RequestRefused("local_world_size_invalid", text, "give the number of processes on the host")
    _check_group(request)


def _check_group(request: JoinJob) -> None:
    if not 1 <= request.group_size <= WORLD_SIZE_MAX:
        text = f"group_size must be from 1 to {WORLD_SIZE_MAX}, got {request.group_size}"
        raise RequestRefused("group_invalid", text, "give the number of processes of a group")
    if not 0 <= request.group_rank < request.group_size:
        text = f"group_rank must be from 0 to {request.group_size - 1}, got {request.group_rank}"
        raise RequestRefused("group_invalid", text, "give the position of the process in its group")
    if request.group or request.group_size > 1:
        check_name("group", request.group)


def _check_range(name: str, number: float, most: float, code: str = "stop_invalid") -> None:
    if not 0 <= number <= most:
        limits = "finite and >= 0" if isinstance(number, float) else ">= 0"
        raise RequestRefused(code, f"{name} must be {limits}, at most {most:g}, got {number}")
