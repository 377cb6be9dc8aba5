"""The grammar of `forgectl ckpt`: checkpoints at a path or URL.

Invariants:
- No daemon is asked.
- A command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from forged.cli.forgectl.parser import Act, Options, Parser, positional, verb, verbs_of, without_daemon

DEFAULT_FOLDER = "./checkpoints"
FORMATS = ("multi_shard", "single_file", "consolidated")
COMPRESSIONS = ("none", "fast", "balanced", "maximum")
RANK_DIGITS_MAX = 7
EPILOG = """\
A checkpoint is named by a path or URL, such as checkpoints/step-100 or s3://bucket/run-7/step-100;
credentials come from the environment, as for the tools of its provider."""


def fill(checkpoints: Parser) -> None:
    """Add the commands to the parser."""
    checkpoints.epilog = EPILOG
    checkpoints.formatter_class = argparse.RawDescriptionHelpFormatter
    checkpoints.set_defaults(where=DEFAULT_FOLDER)
    verbs = verbs_of(checkpoints, _list)
    listing = _verb(verbs, "ls", _list, "list the checkpoints of a folder, and unfinished saves", aliases=["list"])
    positional(listing, "where", "PATH", nargs="?", default=DEFAULT_FOLDER, help=f"or URL (default: {DEFAULT_FOLDER})")
    showing = _verb(verbs, "show", _show, "show the contents of a checkpoint")
    positional(showing, "where", "WHERE")
    _tensors(showing)
    verifying = _verb(verbs, "verify", _verify, "compare every byte of a checkpoint with its checksum")
    positional(verifying, "where", "WHERE")
    verifying.add_argument("--all", action="store_true", help="check all checkpoints in the folder WHERE")
    comparing = _verb(verbs, "diff", _diff, "show the differences between two checkpoints")
    positional(comparing, "a", "A")
    positional(comparing, "b", "B")
    _tensors(comparing)
    looking = _verb(verbs, "cat", _cat, "show a tensor's first elements and statistics, or write it to a file")
    positional(looking, "where", "WHERE")
    positional(looking, "tensor", "TENSOR")
    looking.add_argument(
        "--rank", type=_rank, metavar="N", help="the rank whose tensor is meant (for per-rank tensors)"
    )
    looking.add_argument("--out", metavar="FILE", help="write the whole tensor to this .npy file")
    looking.add_argument("--force", action="store_true", help="replace an existing FILE")
    _converting(verbs)
    removing = _verb(verbs, "rm", _remove, "delete a checkpoint, or files of a failed save", aliases=["remove"])
    positional(removing, "where", "WHERE")
    leftovers = "delete files of failed saves, under this name or in this whole folder"
    removing.add_argument("--unfinished", action="store_true", help=leftovers)
    removing.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")


def _converting(verbs: Any) -> None:
    converting = _verb(
        verbs, "convert", _convert, "convert a checkpoint to another layout, or to or from files of other tools"
    )
    positional(converting, "source", "SOURCE", help="a checkpoint, a .safetensors file or index, or an .npz archive")
    positional(converting, "target", "TARGET", help="a new checkpoint, .safetensors file or .npz archive")
    converting.add_argument(
        "--format", choices=FORMATS, help="layout of the new checkpoint (default: that of the source)"
    )
    converting.add_argument(
        "--compression", choices=COMPRESSIONS, default="none", help="compression of the new checkpoint (default: none)"
    )


def _verb(verbs: Any, name: str, act: Act, text: str, **more: Any) -> Parser:
    return verb(verbs, name, act, text, common=without_daemon(), **more)


def _tensors(parser: Parser) -> None:
    parser.add_argument(
        "--tensors", metavar="PATTERN", help="only tensors whose names match, such as 'model/encoder.*'"
    )
    parser.add_argument("--all", action="store_true", help="do not shorten lists on a terminal")


def _rank(text: str) -> int:
    if not text.isdecimal() or len(text) > RANK_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; ranks are numbers from 0")
    return int(text)


def _list(options: Options) -> int:
    from forged.cli.ckpt.ls import show_list

    return show_list(options)


def _show(options: Options) -> int:
    from forged.cli.ckpt.show import show_one

    return show_one(options)


def _verify(options: Options) -> int:
    from forged.cli.ckpt.verify import verify

    return verify(options)


def _diff(options: Options) -> int:
    from forged.cli.ckpt.diff import show_differences

    return show_differences(options)


def _cat(options: Options) -> int:
    from forged.cli.ckpt.cat import show_tensor

    return show_tensor(options)


def _convert(options: Options) -> int:
    from forged.cli.ckpt.convert import convert_one

    return convert_one(options)


def _remove(options: Options) -> int:
    from forged.cli.ckpt.rm import remove

    return remove(options)
