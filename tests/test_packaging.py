"""The wheel, installed into an empty virtual environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from forged.version import VERSION

ROOT = Path(__file__).parents[1]
SOURCES = ("forged", "systemd", "config", "plugins", "pyproject.toml", "README.md", "LICENSE")
SHARE = "share/forged"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FORGED", "VIRTUAL_ENV"))}


def expected_assets() -> set[str]:
    """The data files of the distribution."""
    patterns = ("systemd/forged.*", "config/*.toml", "plugins/*.py")
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


def pip(*words: str, **options: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, env=CLEAN | options, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because building leaves files behind."""
    directory = tmp_path_factory.mktemp("wheel")
    copy = directory / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(copy))
    [made] = directory.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel and what it asks for."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False)
    python = str(directory / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    pip("--python", python, "install", "--quiet", "--no-compile", "--constraint", constraints, str(wheel))
    return directory


def run(environment: Path, name: str, *words: str) -> str:
    """What a command of the environment prints; elsewhere than in the checkout, so that only the wheel is found."""
    command = [str(environment / "bin" / name), *words]
    done = subprocess.run(command, cwd=environment, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_the_units_the_settings_and_the_plugins(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    carried = {name.partition(f".data/data/{SHARE}/")[2] for name in names if f".data/data/{SHARE}/" in name}
    assert carried == expected_assets()
    assert "forged/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_version_is_defined_in_one_place(wheel: Path) -> None:
    assert wheel.name.startswith(f"forged_ml-{VERSION}-")
    assert not re.search(r"^version\s*=\s*\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    sources = (path for path in (ROOT / "forged").rglob("*.py") if path.name != "version.py")
    assert [str(path) for path in sources if re.search(rf"[\"']{re.escape(VERSION)}[\"']", path.read_text())] == []


@pytest.mark.parametrize("name", ["forged", "forgectl"])
def test_commands_print_their_version(environment: Path, name: str) -> None:
    assert VERSION in run(environment, name, "--version")


def test_the_installed_settings_are_valid(environment: Path) -> None:
    settings = environment / SHARE / "config" / "forged.toml"
    assert run(environment, "forged", "check-config", str(settings)) == f"{settings} is valid\n"


def test_the_installed_command_can_install_its_service(environment: Path, tmp_path: Path) -> None:
    said = run(environment, "forged", "install-service", "--dry-run", "--unprotect", "--root", str(tmp_path))
    assert f"\nExecStart={environment}/bin/forged run --config /etc/forged/forged.toml\n" in said
    assert "ListenStream=/run/forged/forged.sock" in said
    assert f"# would write {tmp_path}/etc/sysusers.d/forged.conf:\n" in said
    assert list(tmp_path.iterdir()) == []


def test_installed_daemon_runs_with_the_wheel_s_dependencies(environment: Path, tmp_path: Path) -> None:
    places = ["--data-dir", str(tmp_path / "data"), "--socket", str(tmp_path / "s"), "--listen", "127.0.0.1:0"]
    command = [str(environment / "bin" / "forged"), "run", *places]
    with subprocess.Popen(command, cwd=tmp_path, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as daemon:
        assert daemon.stdout is not None
        try:
            said = b""
            while b" ready" not in said:
                line = daemon.stdout.readline()
                assert line, said.decode()
                said += line
            assert VERSION in run(environment, "forgectl", "--socket", str(tmp_path / "s"), "status")
        finally:
            daemon.terminate()
    assert daemon.returncode == 0


def test_assets_are_found_in_a_target_directory(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages"), str(wheel))
    code = "from forged.cli.service.assets import asset; print(asset('systemd', 'forged.service'))"
    # Not -I, which would leave out the path that is the point here.
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=CLEAN | {"PYTHONPATH": str(tmp_path / "packages")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(tmp_path / "packages" / SHARE / "systemd" / "forged.service"), found.stderr
