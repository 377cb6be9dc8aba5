from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from forged.errors import ConfigError
from forged.plugins.alarm_guard import AlarmGuard
from forged.plugins.host.loader import GROUP, MODULE_PREFIX, SOURCE_BYTES_MAX, find, in_directory, in_environment
from forged.plugins.host.plugin_host import PluginSource
from forged.plugins.model import PluginRefused, PluginState
from tests.kernel_fixture import on_virtual_time
from tests.plugins.plugin_fixture import running_plugins

UID = os.getuid()
STRANGER = 54321
WELL = "API_VERSION = 1\nloaded = __name__, __file__\ndef register(context): pass\n"
as_root = pytest.mark.skipif(UID != 0, reason="only root can change the owner of a file")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A plugin directory; pytest's temporary directories have acceptable owners and modes."""
    path = tmp_path / "plugins"
    path.mkdir(mode=0o755)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if name.startswith(MODULE_PREFIX):
            del sys.modules[name]


def put(directory: Path, source: str | bytes = WELL, name: str = "one.py") -> Path:
    path = directory / name
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    path.chmod(0o644)
    return path


def only(directory: Path) -> PluginSource:
    (found,) = in_directory(directory, UID)
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refusal(directory: Path) -> ConfigError:
    """Why the only plugin of a directory cannot be loaded."""
    found, before = only(directory), open_files()
    with pytest.raises(ConfigError) as caught:
        found.load()
    assert open_files() == before, "a file was left open"
    assert MODULE_PREFIX + found.name not in sys.modules
    return caught.value


# The directory.


def test_the_modules_of_a_directory_are_found_by_name(directory: Path) -> None:
    for name in ("two.py", "one.py", "_private.py", ".hidden.py", "notes.txt", "old.pyc", "x.py.bak"):
        put(directory, name=name)
    assert [(found.name, found.origin) for found in in_directory(directory, UID)] == [
        ("one", str(directory / "one.py")),
        ("two", str(directory / "two.py")),
    ]


def test_a_file_is_loaded_as_a_module_that_knows_its_name_and_its_file(directory: Path) -> None:
    path = put(directory)
    module = only(directory).load()
    assert module.loaded == (MODULE_PREFIX + "one", str(path))
    assert sys.modules[MODULE_PREFIX + "one"] is module


def test_types_of_a_plugin_can_be_looked_up_while_it_is_loaded(directory: Path) -> None:
    put(
        directory,
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport msgspec\n"
        "class S(msgspec.Struct):\n    a: int\n@dataclass(slots=True)\nclass D:\n    s: S\n"
        "got = msgspec.convert({'a': 1}, S)\n",
    )
    assert only(directory).load().got.a == 1


@pytest.mark.parametrize("name", ["missing", "file"])
def test_unreadable_plugin_directory_is_a_config_error(directory: Path, name: str) -> None:
    put(directory, name="file")
    with pytest.raises(ConfigError) as caught:
        list(in_directory(directory / name, UID))
    assert caught.value.code == "plugin_dir_unreadable"


def test_only_installed_plugins_are_found_without_a_directory() -> None:
    assert all("/" not in found.origin for found in find("", UID))


# Ownership and permissions.


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o777])
def test_file_writable_by_other_users_is_refused(directory: Path, mode: int) -> None:
    path = put(directory)
    path.chmod(mode)
    error = refusal(directory)
    assert (error.code, error.fix) == ("plugin_mode", f"chmod go-w {path}")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("level", [0, 1])
def test_parent_directory_writable_by_other_users_is_refused(directory: Path, mode: int, level: int) -> None:
    put(directory)
    parent = [directory, directory.parent][level]
    parent.chmod(mode)
    error = refusal(directory)
    assert (error.code, error.fix) == ("plugin_mode", f"chmod go-w {parent}")


def test_a_sticky_directory_on_the_way_is_as_good_as_any(directory: Path) -> None:
    put(directory)
    directory.chmod(0o1777)
    assert only(directory).load()


def test_a_sticky_file_is_not(directory: Path) -> None:
    put(directory).chmod(0o1666)
    assert refusal(directory).code == "plugin_mode"


@as_root
def test_file_owned_by_another_user_is_refused(directory: Path) -> None:
    path = put(directory)
    os.chown(path, STRANGER, -1)
    error = refusal(directory)
    assert (error.code, error.fix) == ("plugin_owner", f"chown root {path}")


@as_root
def test_directory_owned_by_another_user_is_refused(directory: Path) -> None:
    put(directory)
    os.chown(directory, STRANGER, -1)
    assert refusal(directory).code == "plugin_owner"


@as_root
def test_files_of_root_or_the_daemons_user_are_trusted(directory: Path) -> None:
    os.chown(put(directory), STRANGER, -1)
    os.chown(directory, STRANGER, -1)
    (found,) = in_directory(directory, STRANGER)
    assert found.load()


def test_symbolic_link_is_judged_by_its_target(directory: Path) -> None:
    good, bad = directory.parent / "good", directory.parent / "bad"
    good.mkdir(mode=0o755)
    bad.mkdir()
    (directory / "one.py").symlink_to(put(good))
    assert only(directory).load()
    bad.chmod(0o777)
    (directory / "one.py").unlink()
    (directory / "one.py").symlink_to(put(bad))
    del sys.modules[MODULE_PREFIX + "one"]
    assert refusal(directory).fix == f"chmod go-w {bad}"


@pytest.mark.parametrize("target", ["nowhere.py", "one.py"])
def test_dangling_symbolic_link_is_refused(directory: Path, target: str) -> None:
    (directory / "one.py").symlink_to(directory / target)
    assert refusal(directory).code == "plugin_unreadable"


# Invalid plugins.


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as it, tempfile.TemporaryDirectory() as short:
        it.bind(f"{short}/s")
        Path(short, "s").rename(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, folder, listener, device])
def test_path_that_is_no_regular_file_is_refused_without_blocking(
    directory: Path, make: Callable[[Path], None]
) -> None:
    make(directory / "one.py")
    error = refusal(directory)
    assert error.code in ("plugin_unreadable", "plugin_mode")


def test_a_file_that_is_too_large_is_refused(directory: Path) -> None:
    put(directory, b"#" * (SOURCE_BYTES_MAX + 1))
    assert "larger than" in refusal(directory).message


def test_a_file_of_the_largest_size_is_loaded(directory: Path) -> None:
    put(directory, WELL.encode().ljust(SOURCE_BYTES_MAX, b"#"))
    assert only(directory).load()


@pytest.mark.parametrize(
    "source",
    [
        b"def",
        b"\xff\xfe\xfa",
        b"x = '\0'",
        b"# coding: martian\n",
        b"raise ValueError('boom')",
        b"import nothing_of_this_name",
        b"raise SystemExit(3)",
        b"raise KeyboardInterrupt",
        b"1/0",
        b"x = " + b"(" * 10_000,
    ],
)
def test_a_module_that_cannot_be_loaded_leaves_nothing_behind(directory: Path, source: bytes) -> None:
    put(directory, source)

    @on_virtual_time
    async def take_in() -> None:
        async with running_plugins(only(directory)) as plugins:
            assert plugins.state() is PluginState.REFUSED
            assert MODULE_PREFIX + "one" not in sys.modules
            assert await plugins.kernel.add() == 1

    take_in()


async def test_an_import_that_never_ends_is_interrupted(directory: Path) -> None:
    put(directory, "while True: pass")
    guard = AlarmGuard()
    try:
        async with running_plugins(only(directory), guard=guard, load_timeout_s=0.05) as plugins:
            assert "blocked the daemon" in str(plugins.plugin().reason)
            assert MODULE_PREFIX + "one" not in sys.modules
    finally:
        guard.close()


def test_file_name_that_is_not_utf8_is_refused_and_recorded(directory: Path) -> None:
    put(directory, name="caf\udce9.py")

    @on_virtual_time
    async def take_in() -> None:
        async with running_plugins(only(directory)) as plugins:
            (refused,) = plugins.kernel.facts(PluginRefused)
            assert refused.plugin == "caf\\udce9"
            assert await plugins.kernel.add() == 1
            assert [view.name for view in plugins.host.views] == ["caf\\udce9"]

    take_in()


def test_a_name_that_is_none_for_a_plugin_is_refused(directory: Path) -> None:
    put(directory, name="My Plugin.py")

    @on_virtual_time
    async def load() -> None:
        async with running_plugins(*in_directory(directory, UID)) as plugins:
            assert "plugin name must match" in str(plugins.plugin("My Plugin").reason)

    load()


# Installed packages.


def point(value: str, name: str = "one") -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def test_entry_points_are_found_by_name() -> None:
    sources = list(in_environment([point("json", "two"), point("json.decoder", "one")]))
    assert [(found.name, found.origin) for found in sources] == [
        ("one", "a package (json.decoder)"),
        ("two", "a package (json)"),
    ]
    assert sources[1].load() is importlib.import_module("json")


def test_an_entry_point_is_to_be_a_module() -> None:
    (found,) = in_environment([point("json:loads")])
    with pytest.raises(ConfigError) as caught:
        found.load()
    assert caught.value.code == "plugin_entry"


@pytest.mark.parametrize("value", ["nothing_of_this_name", "json:nothing", "json.nothing"])
@on_virtual_time
async def test_an_entry_point_that_leads_nowhere_is_refused(value: str) -> None:
    async with running_plugins(*in_environment([point(value)])) as plugins:
        assert plugins.state() is PluginState.REFUSED


def install(directory: Path, metadata: str | None) -> None:
    """What pip leaves behind of a package with one plugin."""
    (directory / "tiny_forged_plugin.py").write_text(WELL)
    info = directory / "tiny_forged_plugin-1.5.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntiny = tiny_forged_plugin\n")
    if metadata is not None:
        (info / "METADATA").write_text(metadata)


@pytest.mark.parametrize(
    ("metadata", "origin", "version"),
    [
        (
            "Metadata-Version: 2.1\nName: tiny-forged-plugin\nVersion: 1.5\n",
            "tiny-forged-plugin (tiny_forged_plugin)",
            "1.5",
        ),
        (None, "a package (tiny_forged_plugin)", ""),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_installed_package_is_found_and_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch, metadata: str | None, origin: str, version: str
) -> None:
    install(directory, metadata)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "tiny_forged_plugin", raising=False)
    (found,) = [one for one in find("", UID) if one.name == "tiny"]
    assert (found.origin, found.version) == (origin, version)

    @on_virtual_time
    async def take_in() -> None:
        async with running_plugins(found) as plugins:
            assert (plugins.state("tiny"), plugins.plugin("tiny").version) == (PluginState.ACTIVE, version)

    take_in()
    monkeypatch.delitem(sys.modules, "tiny_forged_plugin")


def test_installed_plugin_precedes_a_file_of_the_same_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = directory.parent / "site"
    site.mkdir()
    install(site, "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    put(directory, name="tiny.py")
    monkeypatch.syspath_prepend(str(site))
    origins = [found.origin for found in find(str(directory), UID) if found.name == "tiny"]
    assert origins == ["tiny (tiny_forged_plugin)", str(directory / "tiny.py")]
