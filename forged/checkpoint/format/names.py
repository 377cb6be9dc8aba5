"""The names of files in a storage.

Law: a name leads nowhere but into its storage, whatever the storage is, and means the same file in all of them. Parts
that begin with a dot are the storages' own.
"""

from __future__ import annotations

from forged.checkpoint.errors import CheckpointException, invalid

NAME_CHARS_MAX = 1_000
PART_BYTES_MAX = 255
"""What file systems take."""


def check_name(name: str) -> str:
    """A file's name; one that is none is refused."""
    if not name or len(name) > NAME_CHARS_MAX or not all(map(_is_part, name.split("/"))):
        raise _refused(name)
    return name


def check_name_prefix(start: str) -> str:
    """What names begin with: nothing, or whole parts and the beginning of one more."""
    *parts, last = start.split("/")
    if len(start) > NAME_CHARS_MAX or not all(map(_is_part, parts)) or not (_is_part(last) or not last):
        raise _refused(start)
    return start


def _is_part(part: str) -> bool:
    return (
        bool(part)
        and not part.startswith(".")
        and part.isprintable()
        and "\\" not in part
        and len(part.encode()) <= PART_BYTES_MAX
    )


def _refused(name: str) -> CheckpointException:
    return invalid(
        f"{name[:80]!r} is no name of a file in a storage",
        "use relative names with / between parts, none of which is empty or begins with a dot",
        code="checkpoint_name_invalid",
    )
