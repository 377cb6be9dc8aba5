"""`forgectl ckpt`: checkpoints at a path or URL.

Law: no daemon is asked. What a command needs beyond its grammar is loaded when it acts.
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
    """What can be done with checkpoints."""
    checkpoints.epilog = EPILOG
    checkpoints.formatter_class = argparse.RawDescriptionHelpFormatter
    checkpoints.set_defaults(where=DEFAULT_FOLDER)
    verbs = verbs_of(checkpoints, _list)
    listing = _verb(verbs, "ls", _list, "all checkpoints of a folder, and what is left of others", aliases=["list"])
    positional(listing, "where", "PATH", nargs="?", default=DEFAULT_FOLDER, help=f"or URL (default: {DEFAULT_FOLDER})")
    showing = _verb(verbs, "show", _show, "what a checkpoint is, and what is in it")
    positional(showing, "where", "WHERE")
    _tensors(showing)
    verifying = _verb(verbs, "verify", _verify, "compare every byte of a checkpoint with its checksum")
    positional(verifying, "where", "WHERE")
    verifying.add_argument("--all", action="store_true", help="all checkpoints of the folder WHERE")
    comparing = _verb(verbs, "diff", _diff, "what is different between two checkpoints")
    positional(comparing, "a", "A")
    positional(comparing, "b", "B")
    _tensors(comparing)
    looking = _verb(verbs, "cat", _cat, "the first elements of a tensor and its statistics, or all of it as a file")
    positional(looking, "where", "WHERE")
    positional(looking, "tensor", "TENSOR")
    looking.add_argument("--rank", type=_rank, metavar="N", help="whose, where ranks have one each")
    looking.add_argument("--out", metavar="FILE", help="write all of it to this .npy file")
    looking.add_argument("--force", action="store_true", help="also in place of a FILE that is there already")
    _converting(verbs)
    removing = _verb(verbs, "rm", _remove, "delete a checkpoint, or what is left of one", aliases=["remove"])
    positional(removing, "where", "WHERE")
    leftovers = "what saves that came to nothing have left, under this name or in all of this folder"
    removing.add_argument("--unfinished", action="store_true", help=leftovers)
    removing.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _converting(verbs: Any) -> None:
    converting = _verb(verbs, "convert", _convert, "make another checkpoint of one, or from and to other tools' files")
    positional(converting, "source", "SOURCE", help="a checkpoint, a .safetensors file or index, an .npz archive")
    positional(
        converting, "target", "TARGET", help="a checkpoint that is not there yet, or a .safetensors or .npz file"
    )
    converting.add_argument("--format", choices=FORMATS, help="of the new checkpoint (default: that of the source)")
    converting.add_argument("--compression", choices=COMPRESSIONS, default="none", help="(default: none)")


def _verb(verbs: Any, name: str, act: Act, text: str, **more: Any) -> Parser:
    return verb(verbs, name, act, text, common=without_daemon(), **more)


def _tensors(parser: Parser) -> None:
    parser.add_argument("--tensors", metavar="PATTERN", help="only tensors of this name, such as 'model/encoder.*'")
    parser.add_argument("--all", action="store_true", help="leave nothing out on a terminal")


def _rank(text: str) -> int:
    if not text.isdecimal() or len(text) > RANK_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a rank; they count from 0")
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
