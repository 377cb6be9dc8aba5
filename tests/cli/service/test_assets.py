from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forged.cli.service import assets
from forged.cli.service.assets import asset
from forged.errors import ConfigError

ROOT = Path(__file__).parents[3]
Place = Callable[[Path], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Move the package to a directory without files, and empty the install record."""

    def move(beside: Path) -> None:
        monkeypatch.setattr(assets, "PACKAGE_PARENT", beside)
        monkeypatch.setattr(assets, "DISTRIBUTION", "forged-as-it-was-never-installed")
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "data"))

    return move


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("here")
    return path


def test_assets_of_a_checkout_are_next_to_the_package() -> None:
    for kind, name in [("systemd", "forged.service"), ("systemd", "forged.socket"), ("config", "forged.toml")]:
        assert asset(kind, name) == ROOT / kind / name


def test_files_next_to_an_installed_package_are_ignored(place: Place, tmp_path: Path) -> None:
    put(tmp_path / "site-packages" / "systemd" / "forged.service")
    place(tmp_path / "site-packages")
    with pytest.raises(ConfigError) as raised:
        asset("systemd", "forged.service")
    assert raised.value.code == "asset_missing"
    assert "systemd/forged.service" in raised.value.message


@pytest.mark.parametrize("where", ["target", "data"])
def test_assets_without_an_install_record_are_at_the_default_location(place: Place, tmp_path: Path, where: str) -> None:
    put_there = put(tmp_path / where / "share" / "forged" / "config" / "forged.toml")
    place(tmp_path / "target")
    assert asset("config", "forged.toml") == put_there


def test_assets_are_found_by_the_install_record(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_there = put(tmp_path / "venv" / "share" / "forged" / "plugins" / "webhook.py")
    package = tmp_path / "venv" / "lib" / "site-packages"
    info = package / "recorded-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recorded\nVersion: 1.0\n")
    (info / "RECORD").write_text("../../share/forged/plugins/webhook.py,,\nplugins/webhook.py,,\n")
    place(package)
    monkeypatch.setattr(assets, "DISTRIBUTION", "recorded")
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    assert asset("plugins", "webhook.py").resolve() == put_there
