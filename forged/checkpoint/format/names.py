"""File names in a storage.

Invariants:
- A name never refers to a file outside its storage, and means the same file in every kind of storage.
- Name parts that begin with a dot are reserved for the storages, but for one of torch's.
"""

from __future__ import annotations

from forged.checkpoint.errors import CheckpointException, invalid

NAME_CHARS_MAX = 1_000
TORCH_METADATA = ".metadata"
"""The file that describes a directory of `torch.distributed.checkpoint`."""
PART_BYTES_MAX = 255
"""The limit of file systems."""


def check_name(name: str) -> str:
    """Return a file name; refuse an invalid one."""
    if not name or len(name) > NAME_CHARS_MAX or not all(map(_is_part, name.split("/"))):
        raise _refused(name)
    return name


def check_name_prefix(start: str) -> str:
    """Return the beginning of file names: empty, or whole parts and the beginning of one more."""
    *parts, last = start.split("/")
    if len(start) > NAME_CHARS_MAX or not all(map(_is_part, parts)) or not (_is_part(last) or not last):
        raise _refused(start)
    return start


def _is_part(part: str) -> bool:
    return (
        bool(part)
        and (not part.startswith(".") or part == TORCH_METADATA)
        and part.isprintable()
        and "\\" not in part
        and len(part.encode()) <= PART_BYTES_MAX
    )


def _refused(name: str) -> CheckpointException:
    return invalid(
        f"{name[:80]!r} is not a valid file name in a storage",
        "use a relative name with / between parts that are not empty and do not begin with a dot",
        code="checkpoint_name_invalid",
    )
