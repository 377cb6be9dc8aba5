"""`forged install-service`: install the systemd units, the configuration and the user of the daemon.

Invariants:
- A file appears completely or not at all. A second run changes nothing.
- A unit that was edited by hand stays; the new one is written next to it. An existing configuration is never changed.
- `--dry-run` shows what would be done.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forged.cli.process import EXIT_OK, say
from forged.cli.service.assets import PACKAGE_PARENT, asset
from forged.errors import ConfigError, ForgedError
from forged.file_sync import sync_directory
from forged.systemd.unit import hidden, is_untouched, stamped, unprotected, with_command

BOOTED = Path("/run/systemd/system")
"""Exists if systemd runs this machine."""
NEXT_TO_IT = ".forged-new"
"""The suffix of a new file next to one that was edited by hand."""
CONFIG = "/etc/forged/forged.toml"
PLUGINS = "/etc/forged/plugins"
SYSUSERS = "/etc/sysusers.d/forged.conf"
UNITS = "/etc/systemd/system"
FIRST_LINE_BYTES_MAX = 4096
FILE_MODE = 0o644
DIRECTORY_MODE = 0o755

Outcome = Literal["written", "unchanged", "kept", "aside"]
Options = argparse.Namespace


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """A file to install. A stamped file (`ours`) is replaced by new versions; any other belongs to the operator."""

    path: Path
    content: bytes
    ours: bool = True

    @property
    def aside(self) -> Path:
        """The path next to a file that was edited by hand."""
        return self.path.with_name(self.path.name + NEXT_TO_IT)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("install-service", help="install the systemd units")
    parser.add_argument("--dry-run", action="store_true", help="print the files and write nothing")
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="root directory of another system")
    parser.add_argument("--exec", metavar="PATH", help="the forged command that the unit starts (default: this one)")
    parser.add_argument(
        "--unprotect",
        action="store_true",
        help="allow a command in a home or temporary directory: the unit then lets the daemon see it",
    )
    parser.set_defaults(act=install)


def install(options: Options) -> int:
    """Install the service, or show what would be installed; returns the exit code."""
    root = Path(os.path.abspath(options.root))  # noqa: PTH100 - Path.resolve would follow links
    plan = _plan(root, _unit(options, root))
    if options.dry_run:
        _print_plan(root, plan)
        return EXIT_OK
    _apply(root, plan)
    _activate(root)
    _print_next_steps(root)
    return EXIT_OK


def decide(found: bytes | None, file: InstalledFile) -> Outcome:
    """What happens to a file, given the present content."""
    if found is None:
        return "written"
    if found == file.content:
        return "unchanged"
    if not file.ours:
        return "kept"
    return "written" if is_untouched(found) else "aside"


# The files.


def _plan(root: Path, unit: str) -> list[InstalledFile]:
    return [
        InstalledFile(_under(root, SYSUSERS), stamped(_read_asset("systemd", "forged.sysusers"))),
        InstalledFile(_under(root, f"{UNITS}/forged.socket"), stamped(_read_asset("systemd", "forged.socket"))),
        InstalledFile(_under(root, f"{UNITS}/forged.service"), stamped(unit)),
        InstalledFile(_under(root, CONFIG), _read_asset("config", "forged.toml").encode(), ours=False),
    ]


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _read_asset(kind: str, name: str) -> str:
    return asset(kind, name).read_text(encoding="utf-8")


def _unit(options: Options, root: Path) -> str:
    """The service unit for the configured command."""
    command = options.exec or _this_command()
    if root == Path("/") and not os.access(command, os.X_OK):
        raise ConfigError("command_missing", f"{command} is not an executable file", "set --exec to the path of forged")
    unit = with_command(_read_asset("systemd", "forged.service"), command)
    hiding = hidden(_parts(Path(command), its_own=options.exec is None))
    if hiding and not options.unprotect:
        path = next(iter(hiding.values()))
        raise ConfigError(
            "command_hidden",
            f"the service cannot access {path}: the unit hides home and temporary directories",
            "install forged elsewhere, such as with `python3.11 -m venv /opt/forged`, on a Python that all users can"
            " run; or add --unprotect",
        )
    return unprotected(unit, hiding)


def _this_command() -> str:
    """The absolute path of the command that is running."""
    started = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("forged")
    for path in (started, beside):
        if path.name == "forged" and path.is_file() and os.access(path, os.X_OK):
            return os.path.abspath(path)  # noqa: PTH100 - a link such as /usr/local/bin/forged is the better name
    raise ConfigError(
        "command_unknown", "cannot find the path of the `forged` command", "set --exec to the path of forged"
    )


def _parts(command: Path, *, its_own: bool) -> Iterator[Path]:
    """The paths that the command needs: itself, its interpreter and its code, also behind symbolic links."""
    own = [Path(sys.executable), PACKAGE_PARENT] if its_own else []
    parts = [command, *_interpreter(command), *own]
    for part in parts:
        yield part
        yield part.resolve()


def _interpreter(command: Path) -> list[Path]:
    """The interpreter in a script's first line."""
    try:
        with command.open("rb") as file:
            words = file.readline(FIRST_LINE_BYTES_MAX).split()
    except OSError:
        return []
    return [Path(os.fsdecode(words[0][2:]))] if words and words[0].startswith(b"#!/") else []


# Writing.


def _print_plan(root: Path, plan: Sequence[InstalledFile]) -> None:
    for file in plan:
        with _refusals_of(file.path):
            outcome = decide(_found(file.path), file)
        if outcome != "written":
            print(f"# would keep {file.path}: {_REASONS[outcome]}\n")
        if outcome in ("written", "aside"):
            path = file.aside if outcome == "aside" else file.path
            print(f"# would write {path}:\n{file.content.decode()}")
    plugins = _under(root, PLUGINS)
    print(f"# would {'keep' if plugins.is_dir() else 'create'} the directory {plugins}")


def _apply(root: Path, plan: Sequence[InstalledFile]) -> None:
    for file in plan:
        with _refusals_of(file.path):
            outcome = _put(file)
        say(f"{file.path}: {_REASONS[outcome]}{f'; the new version is {file.aside}' if outcome == 'aside' else ''}")
    plugins = _under(root, PLUGINS)
    with _refusals_of(plugins):
        made = _make_directory(plugins)
    say(f"{plugins}: {_REASONS['written' if made else 'unchanged']}")


def _put(file: InstalledFile) -> Outcome:
    outcome = decide(_found(file.path), file)
    _make_directory(file.path.parent)
    if outcome == "written":
        _write(file.path, file.content)
        file.aside.unlink(missing_ok=True)
    elif outcome == "aside":
        _write(file.aside, file.content)
    return outcome


_REASONS: Mapping[Outcome, str] = {
    "written": "written",
    "unchanged": "unchanged",
    "kept": "kept, because it exists",
    "aside": "kept, because it was edited",
}


def _found(path: Path) -> bytes | None:
    """The present content; a symbolic link counts as edited by hand."""
    if path.is_symlink():
        return b""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _make_directory(path: Path) -> bool:
    """Create a directory and its parents, readable for all; returns whether it was missing."""
    if path.is_dir():
        return False
    _make_directory(path.parent)
    path.mkdir()
    path.chmod(DIRECTORY_MODE)
    return True


def _write(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with staged.open("xb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def _refusals_of(path: Path) -> Iterator[None]:
    """Raise an error of the system as `ConfigError`."""
    try:
        yield
    except PermissionError as error:
        what = f"{path}: {error.strerror}"
        raise ConfigError("install_not_permitted", what, "run it as root; --dry-run only shows the files") from error
    except OSError as error:
        what = f"{path}: {error.strerror}"
        raise ConfigError("install_failed", what, "check the path and the free space") from error


# Activation.


def _commands(root: Path) -> list[tuple[str, ...]]:
    """The commands after which systemd uses the files."""
    if root != Path("/"):
        return [("systemd-sysusers", f"--root={root}", "forged.conf")]
    return [("systemd-sysusers", SYSUSERS), ("systemctl", "daemon-reload")]


def _activate(root: Path) -> None:
    """Create the user and reload systemd; if systemd does not run here, print the commands."""
    commands = _commands(root)
    if root == Path("/") and BOOTED.is_dir():
        for command in commands:
            _run(command)
        return
    say("\nsystemd does not run here; run these commands yourself:")
    for command in commands:
        say(f"  {' '.join(command)}")


def _run(command: tuple[str, ...]) -> None:
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    except OSError as error:
        raise ForgedError("systemd_failed", f"`{shown}`: {error.strerror}", "run it by hand") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ForgedError("systemd_failed", f"`{shown}`: {said}", "fix the problem and run it by hand")
    say(f"{shown}: done")


def _print_next_steps(root: Path) -> None:
    where = "" if root == Path("/") else f" --root={root}"
    start = "enable" if where else "enable --now"
    say(
        f"\nNext steps:\n"
        f"  edit {_under(root, CONFIG)}\n"
        f"  systemctl{where} {start} forged.socket forged.service\n"
        f"  usermod --append --groups forged NAME, for each user of forgectl (see also unix_other_role)"
    )
