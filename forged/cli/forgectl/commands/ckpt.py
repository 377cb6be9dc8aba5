"""The grammar of `forgectl ckpt`: checkpoints at a path or URL, and with `--job` those of a daemon's catalogue.

Invariants:
- A daemon is asked only if `--job` is given.
- A command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forged.cli.forgectl.parser import (
    Act,
    Options,
    Parser,
    add_reason,
    positional,
    verb,
    verbs_of,
    with_or_without_daemon,
    without_daemon,
)
from forged.cli.forgectl.values import count
from forged.errors import ConfigError

DEFAULT_FOLDER = "./checkpoints"
FORMATS = ("multi_shard", "single_file", "consolidated")
COMPRESSIONS = ("none", "fast", "balanced", "maximum")
RANK_DIGITS_MAX = 7
EPILOG = """\
Without --job a checkpoint is named by a path or URL, such as checkpoints/step-100 or
s3://bucket/run-7/step-100, and no daemon is needed; credentials come from the environment, as for
the tools of its provider.
With --job the daemon's catalogue is asked. A checkpoint is named by its id or the beginning of it,
by its step as @1200, or as latest: the one that the job would be restored from."""


def fill(checkpoints: Parser) -> None:
    """Add the commands to the parser."""
    checkpoints.epilog = EPILOG
    checkpoints.formatter_class = argparse.RawDescriptionHelpFormatter
    checkpoints.set_defaults(where=None, job=None, follow=False, all=False)
    verbs = verbs_of(checkpoints, _list)
    _listing(verbs, checkpoints)
    _inspecting(verbs)
    _converting(verbs)
    _removing(verbs)
    _catalogue(verbs)


def _listing(verbs: Any, checkpoints: Parser) -> None:
    listing = verb(
        verbs, "ls", _list, "list the checkpoints of a folder and unfinished saves, or those of a job",
        aliases=["list"], common=with_or_without_daemon(),
    )  # fmt: skip
    positional(listing, "where", "PATH", nargs="?", default=None, help=f"or URL (default: {DEFAULT_FOLDER})")
    listing.add_argument("--follow", "-f", action="store_true", help="with --job: show new facts as they come")
    listing.add_argument("--all", action="store_true", help="do not shorten lists on a terminal")
    for parser in (checkpoints, listing):
        _optional_job(parser)


def _inspecting(verbs: Any) -> None:
    showing = verb(
        verbs, "show", _show, "show the contents of a checkpoint, or with --job what the catalogue knows of it",
        common=with_or_without_daemon(),
    )  # fmt: skip
    positional(showing, "where", "WHERE")
    _tensors(showing)
    _optional_job(showing)
    verifying = verb(
        verbs, "verify", _verify, "compare every byte of a checkpoint with its checksum",
        common=with_or_without_daemon(),
    )  # fmt: skip
    positional(verifying, "where", "WHERE")
    verifying.add_argument("--all", action="store_true", help="check all checkpoints in the folder WHERE")
    _optional_job(verifying)
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


def _converting(verbs: Any) -> None:
    text = "convert a checkpoint to another layout, or to or from files of other tools"
    converting = _verb(verbs, "convert", _convert, text)
    files = ".safetensors, .npz, .pt or .pth file"
    positional(converting, "source", "SOURCE", help=f"a checkpoint, a {files}, an index, or a directory of torch's DCP")
    positional(converting, "target", "TARGET", help=f"a new checkpoint, or a new {files}")
    converting.add_argument(
        "--format",
        choices=[*FORMATS, "dcp"],
        help="layout of the new checkpoint (default: that of the source); dcp: a directory of torch's DCP",
    )
    converting.add_argument(
        "--compression", choices=COMPRESSIONS, default="none", help="compression of the new checkpoint (default: none)"
    )


def _removing(verbs: Any) -> None:
    removing = verb(
        verbs, "rm", _remove, "delete a checkpoint, or files of a failed save", aliases=["remove"],
        common=with_or_without_daemon(),
    )  # fmt: skip
    positional(removing, "where", "WHERE")
    leftovers = "delete files of failed saves, under this name or in this whole folder"
    removing.add_argument("--unfinished", action="store_true", help=leftovers)
    removing.add_argument("--force", action="store_true", help="delete it even if other checkpoints need it")
    removing.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    _optional_job(removing)


def _catalogue(verbs: Any) -> None:
    """The commands that are only about the catalogue."""
    restoring = _of_job(verbs, "restore-point", _restore_point, "show what a job is restored from")
    restoring.add_argument("--max-step", type=count, metavar="N", help="only checkpoints up to this step")
    restoring.add_argument("--max-epoch", type=count, metavar="N", help="only checkpoints up to this epoch")
    restoring.add_argument("--folder", metavar="PATH", help="only checkpoints in this folder or URL")
    restoring.add_argument("--prefer-full", action="store_true", help="of one step take one that needs no other one")
    restoring.add_argument("--all", action="store_true", help="do not shorten lists on a terminal")
    _of_checkpoint(verbs, "estimate", _estimate, "estimate how long a restore from a checkpoint takes")
    _of_checkpoint(verbs, "pin", _pin, "keep a checkpoint regardless of the retention policy")
    _of_checkpoint(verbs, "unpin", _unpin, "leave a checkpoint to the retention policy again")
    add_reason(_of_checkpoint(verbs, "reinstate", _reinstate, "offer an abandoned checkpoint again"))
    collecting = _of_job(verbs, "gc", _collect, "delete the checkpoints that the retention policy does not keep")
    collecting.add_argument("--dry-run", action="store_true", help="only show what goes and what is kept, and why")
    collecting.add_argument("--all", action="store_true", help="do not shorten lists on a terminal")
    compacting = verb(
        verbs, "compact", _compact, "make a full checkpoint of an incremental one",
        common=with_or_without_daemon(),
    )  # fmt: skip
    text = "path or URL; with --job its id or the beginning of it, @STEP, or latest"
    positional(compacting, "checkpoint", "WHERE", help=text)
    compacting.add_argument("--follow", "-f", action="store_true", help="with --job, show the progress until it ends")
    _optional_job(compacting)
    adopting = _of_job(verbs, "adopt", _adopt, "add the checkpoints of a folder to the catalogue")
    positional(adopting, "where", "PATH", help="or URL")
    adopting.add_argument("--dry-run", action="store_true", help="change nothing; show what would be added")


def _verb(verbs: Any, name: str, act: Act, text: str) -> Parser:
    """Add a verb that needs no daemon."""
    return verb(verbs, name, act, text, common=without_daemon())


def _of_job(verbs: Any, name: str, act: Act, text: str) -> Parser:
    """Add a verb about the catalogue of a job."""
    parser = verb(verbs, name, act, text)
    parser.add_argument("--job", required=True, metavar="JOB", help="the job")
    return parser


def _of_checkpoint(verbs: Any, name: str, act: Act, text: str) -> Parser:
    """Add a verb about one checkpoint of the catalogue."""
    parser = _of_job(verbs, name, act, text)
    positional(parser, "checkpoint", "CHECKPOINT", help="its id or the beginning of it, @STEP, or latest")
    return parser


def _optional_job(parser: Parser) -> None:
    text = "ask the daemon's catalogue about this job"
    parser.add_argument("--job", default=argparse.SUPPRESS, metavar="JOB", help=text)


def _tensors(parser: Parser) -> None:
    parser.add_argument(
        "--tensors", metavar="PATTERN", help="only tensors whose names match, such as 'model/encoder.*'"
    )
    parser.add_argument("--all", action="store_true", help="do not shorten lists on a terminal")


def _rank(text: str) -> int:
    if not text.isdecimal() or len(text) > RANK_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; ranks are numbers from 0")
    return int(text)


# Commands about a folder, or with `--job` about a job.


def _list(options: Options) -> int:
    if options.job:
        from forged.cli.catalog.ls import show_list

        _refuse_with_job(options.where, "a path", "the list of a job has its checkpoints in all folders")
        return show_list(options)
    from forged.cli.ckpt.ls import show_list as show_folder

    if options.follow:
        raise ConfigError("usage_wrong", "--follow needs --job: facts are about jobs", "add --job")
    if options.where is None:
        if not Path(DEFAULT_FOLDER).is_dir():
            raise ConfigError(
                "usage_wrong",
                f"neither a folder nor a job is given, and {DEFAULT_FOLDER} does not exist",
                "name a folder (`forgectl ckpt ls PATH`), or a job (`forgectl ckpt ls --job JOB`)",
            )
        options.where = DEFAULT_FOLDER
    return show_folder(options)


def _show(options: Options) -> int:
    if options.job:
        from forged.cli.catalog.show import show_one

        _refuse_with_job(options.tensors, "--tensors", "the catalogue does not know tensors")
        return show_one(options)
    from forged.cli.ckpt.show import show_one as show_at_path

    return show_at_path(options)


def _remove(options: Options) -> int:
    if options.job:
        from forged.cli.catalog.rm import remove

        _refuse_with_job(options.unfinished, "--unfinished", "the catalogue does not list such files")
        _refuse_with_job(options.force, "--force", "the catalogue deletes no checkpoint that another one needs")
        return remove(options)
    from forged.cli.ckpt.rm import remove as remove_at_path

    return remove_at_path(options)


def _verify(options: Options) -> int:
    from forged.cli.ckpt.verify import verify

    if options.job:
        from forged.cli.catalog.names import path_of
        from forged.cli.forgectl.connection import DaemonConnection

        _refuse_with_job(options.all, "--all", "one checkpoint of the catalogue is named")
        with DaemonConnection(options) as daemon:
            options.where = path_of(daemon, options.job, options.where)
    return verify(options)


def _refuse_with_job(given: object, option: str, reason: str) -> None:
    if given:
        raise ConfigError("usage_wrong", f"{option} and --job are both given: {reason}", "omit one of them")


# Commands about a path or URL.


def _diff(options: Options) -> int:
    from forged.cli.ckpt.diff import show_differences

    return show_differences(options)


def _cat(options: Options) -> int:
    from forged.cli.ckpt.cat import show_tensor

    return show_tensor(options)


def _convert(options: Options) -> int:
    from forged.cli.ckpt.convert import convert_one

    return convert_one(options)


# Commands about the catalogue of a job.


def _restore_point(options: Options) -> int:
    from forged.cli.catalog.restore_point import show_restore_points

    return show_restore_points(options)


def _estimate(options: Options) -> int:
    from forged.cli.catalog.show import show_estimate

    return show_estimate(options)


def _pin(options: Options) -> int:
    from forged.cli.catalog.show import pin

    return pin(options)


def _unpin(options: Options) -> int:
    from forged.cli.catalog.show import unpin

    return unpin(options)


def _reinstate(options: Options) -> int:
    from forged.cli.catalog.show import reinstate

    return reinstate(options)


def _collect(options: Options) -> int:
    from forged.cli.catalog.gc import collect

    return collect(options)


def _compact(options: Options) -> int:
    if options.job:
        from forged.cli.catalog.compact import compact

        return compact(options)
    from forged.cli.ckpt.compact import compact_one

    if options.follow:
        raise ConfigError("usage_wrong", "--follow needs --job: without it, the command itself compacts", "omit it")
    return compact_one(options)


def _adopt(options: Options) -> int:
    from forged.cli.catalog.adopt import adopt

    return adopt(options)
