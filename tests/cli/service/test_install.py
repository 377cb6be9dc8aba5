from __future__ import annotations

import argparse
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forged.cli.service import install
from forged.cli.service.assets import asset
from forged.cli.service.install import NEXT_TO_IT, InstalledFile, decide
from forged.errors import ConfigError, ForgedError
from forged.systemd.unit import is_untouched, stamped

SERVICE = "etc/systemd/system/forged.service"
SOCKET = "etc/systemd/system/forged.socket"
SYSUSERS = "etc/sysusers.d/forged.conf"
CONFIG = "etc/forged/forged.toml"
PLUGINS = "etc/forged/plugins"
FILES = (SYSUSERS, SOCKET, SERVICE, CONFIG)

ANALYZE = shutil.which("systemd-analyze")
with_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
EXPOSURE_MAX = 1.6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def run(root: Path, *flags: str, command: str | None = "/opt/forged/bin/forged") -> int:
    """`forged install-service` with these flags."""
    parser = argparse.ArgumentParser()
    install.add_parser(parser.add_subparsers())
    chosen = [] if command is None else ["--exec", command]
    options = parser.parse_args(["install-service", "--root", str(root), *chosen, *flags])
    code: int = options.act(options)
    return code


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The mode and content of every file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in files}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def refused(code: str) -> Iterator[None]:
    """Expect a config error with this reason in the block."""
    with pytest.raises(ConfigError) as raised:
        yield
    assert raised.value.code == code


class TestDecide:
    ours = InstalledFile(Path("/unit"), stamped("new"))
    theirs = InstalledFile(Path("/settings"), b"new", ours=False)

    @pytest.mark.parametrize(
        ("found", "unit", "settings"),
        [
            (None, "written", "written"),
            (stamped("new"), "unchanged", "kept"),
            (b"new", "aside", "unchanged"),
            (stamped("old"), "written", "kept"),
            (stamped("old") + b"Nice=5\n", "aside", "kept"),
            (b"", "aside", "kept"),
        ],
    )
    def test_only_unmodified_files_of_the_package_are_overwritten(
        self, found: bytes | None, unit: str, settings: str
    ) -> None:
        assert (decide(found, self.ours), decide(found, self.theirs)) == (unit, settings)


def versions(root: Path) -> dict[Path, tuple[int, int]]:
    """The inode and the time of the last change of each file."""
    return {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in root.rglob("*")}


class TestInstalling:
    def test_installs_all_files_under_any_umask(self, root: Path) -> None:
        with umask(0o077):
            assert run(root) == 0
        installed = tree(root)
        assert sorted(installed) == sorted(FILES)
        assert {mode for mode, _ in installed.values()} == {0o644}
        assert {stat.S_IMODE(path.stat().st_mode) for path in (root / PLUGINS, *(root / PLUGINS).parents[:3])} == {
            0o755
        }
        assert installed[CONFIG][1] == asset("config", "forged.toml").read_bytes()
        assert b"\nExecStart=/opt/forged/bin/forged run " in installed[SERVICE][1]
        assert all(is_untouched(installed[name][1]) for name in (SERVICE, SOCKET, SYSUSERS))

    def test_prints_each_file_and_the_next_steps(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run(root)
        said = capsys.readouterr().out
        assert all(f"{root / name}: written\n" in said for name in (*FILES, PLUGINS))
        assert f"systemd-sysusers --root={root} forged.conf" in said
        assert f"systemctl --root={root} enable forged.socket forged.service" in said

    def test_second_installation_changes_nothing(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run(root)
        before = versions(root)
        capsys.readouterr()
        assert run(root) == 0
        assert versions(root) == before
        said = capsys.readouterr().out
        assert all(f"{root / name}: unchanged\n" in said for name in (*FILES, PLUGINS))

    def test_unit_of_another_version_is_updated(self, root: Path) -> None:
        run(root)
        (root / SERVICE).write_bytes(stamped("[Service]\nExecStart=/old/forged\n"))
        run(root, command="/opt/other/bin/forged")
        assert b"\nExecStart=/opt/other/bin/forged run " in (root / SERVICE).read_bytes()

    def test_modified_unit_is_kept_and_the_new_one_is_written_beside_it(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(root)
        mine = (root / SERVICE).read_bytes() + b"\n# mine\n"
        (root / SERVICE).write_bytes(mine)
        capsys.readouterr()
        run(root, command="/opt/other/bin/forged")
        aside = root / f"{SERVICE}{NEXT_TO_IT}"
        assert (root / SERVICE).read_bytes() == mine
        assert b"/opt/other/bin/forged" in aside.read_bytes()
        said = capsys.readouterr().out
        assert f"{root / SERVICE}: kept, because it was edited; the new version is {aside}\n" in said
        aside.replace(root / SERVICE)
        run(root)
        assert not aside.exists()

    def test_existing_settings_are_never_changed(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (root / CONFIG).parent.mkdir(parents=True)
        (root / CONFIG).write_text("# mine")
        run(root)
        assert (root / CONFIG).read_text() == "# mine"
        assert sorted(tree(root)) == sorted(FILES)
        assert "forged.toml: kept, because it exists\n" in capsys.readouterr().out

    def test_a_masked_unit_stays_masked(self, root: Path) -> None:
        (root / SERVICE).parent.mkdir(parents=True)
        (root / SERVICE).symlink_to("/dev/null")
        run(root)
        assert (root / SERVICE).readlink() == Path("/dev/null")

    def test_dangling_link_stays_a_link(self, root: Path) -> None:
        (root / SERVICE).parent.mkdir(parents=True)
        (root / SERVICE).symlink_to("/none/forged.service")
        run(root)
        assert (root / SERVICE).is_symlink()

    def test_failed_write_leaves_no_file(self, root: Path) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        code = f"""
import resource, signal, sys
from forged.errors import ConfigError
from tests.cli.service.test_install import run
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {hard}))
try:
    run(Path({str(root)!r}))
except ConfigError as error:
    print(error.code, error)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
        )
        assert f"install_failed {root / SERVICE}: File too large" in done.stdout, done.stderr
        assert sorted(tree(root)) == sorted([SYSUSERS, SOCKET])

    def test_directory_in_place_of_a_file_is_a_config_error(self, root: Path) -> None:
        (root / SERVICE).mkdir(parents=True)
        with pytest.raises(ConfigError, match="Is a directory") as raised:
            run(root)
        assert raised.value.code == "install_failed"

    def test_file_in_place_of_a_directory_is_a_config_error(self, root: Path) -> None:
        root.write_text("not a directory")
        with refused("install_failed"):
            run(root)

    def test_missing_write_permission_names_the_fix(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, *_: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ConfigError, match="run it as root") as raised:
            run(root)
        assert raised.value.code == "install_not_permitted"

    def test_closed_output_does_not_stop_the_installation(self, root: Path) -> None:
        code = f"from tests.cli.service.test_install import run\nfrom pathlib import Path\nrun(Path({str(root)!r}))"
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=Path(__file__).parents[3], stdout=writer, stderr=subprocess.PIPE
            )
        finally:
            os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")
        assert sorted(tree(root)) == sorted(FILES)


class TestDryRun:
    def test_shows_planned_files_and_writes_nothing(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(root, "--dry-run") == 0
        said = capsys.readouterr().out
        assert not root.exists()
        run(root)
        for name in FILES:
            assert f"# would write {root / name}:\n{(root / name).read_text()}" in said
        assert f"# would create the directory {root / PLUGINS}\n" in said

    def test_shows_files_that_would_be_kept(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run(root)
        (root / SERVICE).write_text("# mine")
        (root / CONFIG).write_text("# mine")
        before = tree(root)
        capsys.readouterr()
        run(root, "--dry-run")
        assert tree(root) == before
        said = capsys.readouterr().out
        assert f"# would keep {root / SOCKET}: unchanged\n" in said
        assert f"# would keep {root / CONFIG}: kept, because it exists\n" in said
        assert f"# would keep {root / SERVICE}: kept, because it was edited\n" in said
        assert f"# would write {root / SERVICE}{NEXT_TO_IT}:\n" in said
        assert f"# would keep the directory {root / PLUGINS}\n" in said


class TestTheCommand:
    def make(self, path: Path, text: str = "#!/usr/bin/python3\n") -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    @pytest.mark.parametrize("command", ["/home/me/bin/forged", "/root/venv/bin/forged", "/tmp/venv/bin/forged"])
    def test_command_hidden_from_the_service_is_refused(self, root: Path, command: str) -> None:
        with pytest.raises(ConfigError, match=command) as raised:
            run(root, command=command)
        assert raised.value.code == "command_hidden"
        assert "/opt/forged" in raised.value.fix
        assert not root.exists()

    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The one directory that the unit hides."""
        home = tmp_path / "home"
        monkeypatch.setattr("forged.systemd.unit.HIDDEN", {"ProtectHome": ((str(home),), "read-only")})
        return home

    def test_a_command_with_a_hidden_interpreter_is_refused(self, root: Path, tmp_path: Path, home: Path) -> None:
        command = self.make(tmp_path / "forged", f"#!{home}/.pyenv/bin/python3 -I\n")
        with refused("command_hidden"):
            run(root, command=command)

    def test_command_linked_into_a_home_is_refused(self, root: Path, tmp_path: Path, home: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "forged").symlink_to(self.make(home / "forged"))
        with refused("command_hidden"):
            run(root, command=str(tmp_path / "bin" / "forged"))

    @pytest.mark.parametrize("text", ["", "\x7fELF\n", "#!\n", "#! \n"])
    def test_binary_command_is_checked_by_its_path(self, root: Path, tmp_path: Path, home: Path, text: str) -> None:
        assert run(root, command=self.make(tmp_path / "forged", text)) == 0

    def test_command_in_a_home_is_accepted_with_unprotect(self, root: Path) -> None:
        run(root, "--unprotect", command="/home/me/bin/forged")
        unit = (root / SERVICE).read_bytes()
        assert b"\nProtectHome=read-only\n" in unit
        assert b"\nPrivateTmp=yes\n" in unit

    def test_default_command_is_the_running_one(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = self.make(tmp_path / "bin" / "forged")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["bin/forged", "install-service"])
        run(root, "--unprotect", command=None)
        assert f"\nExecStart={command} run ".encode() in (root / SERVICE).read_bytes()

    def test_command_is_beside_the_interpreter_when_run_as_a_module(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = self.make(tmp_path / "bin" / "forged")
        monkeypatch.setattr(sys, "argv", ["/somewhere/forged/cli/forged.py"])
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        run(root, "--unprotect", command=None)
        assert f"\nExecStart={command} run ".encode() in (root / SERVICE).read_bytes()

    def test_command_must_be_given_when_none_is_found(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["-c"])
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with refused("command_unknown"):
            run(root, command=None)

    def test_missing_command_is_refused(self) -> None:
        with refused("command_missing"):
            run(Path("/"), "--dry-run", command="/opt/none/bin/forged")


class TestRegistration:
    """The commands that an installation under systemd runs; they are recorded and not executed."""

    @pytest.fixture
    def commands(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(install, "BOOTED", tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path

    def answer(self, directory: Path, name: str, script: str) -> None:
        path = directory / name
        path.write_text(f"#!/bin/sh\necho {name} $* >>{directory}/log\n{script}\n")
        path.chmod(0o755)

    def test_creates_the_user_and_reloads_the_units(self, commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("systemd-sysusers", "systemctl"):
            self.answer(commands, name, "exit 0")
        install._activate(Path("/"))
        log = (commands / "log").read_text()
        assert log == "systemd-sysusers /etc/sysusers.d/forged.conf\nsystemctl daemon-reload\n"
        assert "systemctl daemon-reload: done\n" in capsys.readouterr().out

    def test_failed_command_is_reported(self, commands: Path) -> None:
        self.answer(commands, "systemd-sysusers", "echo no such luck >&2; exit 1")
        with pytest.raises(ForgedError, match="no such luck") as raised:
            install._activate(Path("/"))
        assert raised.value.code == "systemd_failed"
        assert "systemctl" not in (commands / "log").read_text()

    def test_missing_tool_is_reported(self, commands: Path) -> None:
        with pytest.raises(ForgedError, match="No such file") as raised:
            install._activate(Path("/"))
        assert raised.value.code == "systemd_failed"

    def test_without_systemd_the_commands_are_left_to_the_operator(
        self, commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(install, "BOOTED", commands / "none")
        install._activate(Path("/"))
        said = capsys.readouterr().out
        assert "  systemd-sysusers /etc/sysusers.d/forged.conf\n  systemctl daemon-reload\n" in said
        assert not (commands / "log").exists()


class TestInstalledUnits:
    """The installed units, checked by systemd's own tools."""

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        assert ANALYZE is not None
        return subprocess.run([ANALYZE, *words], capture_output=True, text=True)

    @with_analyze
    def test_units_pass_systemd_analyze_verify(self, root: Path) -> None:
        run(root, "--unprotect", command=sys.executable)
        done = self.ask("verify", str(root / SERVICE), str(root / SOCKET))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    @with_analyze
    def test_units_have_a_low_exposure(self, root: Path) -> None:
        run(root)
        done = self.ask(
            "security", "--offline=true", f"--threshold={round(EXPOSURE_MAX * 10)}", "--no-pager", str(root / SERVICE)
        )
        exposure = float(done.stdout.rpartition("forged.service:")[2].split()[0])
        assert done.returncode == 0, done.stdout
        assert exposure < EXPOSURE_MAX

    @pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
    def test_user_and_group_are_created(self, root: Path) -> None:
        run(root)
        done = subprocess.run(["systemd-sysusers", f"--root={root}", "forged.conf"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [user] = [line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("forged:")]
        assert user.endswith(":forged daemon:/var/lib/forged:/usr/sbin/nologin")
        assert "forged:x:" in (root / "etc/group").read_text()
