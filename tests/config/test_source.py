from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forged.config import DEFAULT_LISTEN, Config, SettingsFile, SettingsReader, load
from forged.config.source import FILE_BYTES_MAX, PROBLEMS_MAX, READS_MAX
from forged.errors import ConfigError, Problem
from forged.paths import ROOT_DATA_DIR, ROOT_SOCKET
from tests.config.files import HOME, NOTHING, USER, problems, read, write, wrong_keys

NO_ROOT = pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")


def settings(path: Path | None, pause: Callable[[], None] = lambda: None, **overrides: Any) -> SettingsReader:
    return SettingsReader(path, overrides, HOME, USER, pause=pause)


def refusal(act: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        act()
    return caught.value


# What holds.


def test_config_without_a_file_has_the_defaults() -> None:
    config = load(None, NOTHING, HOME, USER)
    assert config.listen == (f"tcp://{DEFAULT_LISTEN}",)
    assert (config.data_dir, config.socket) == (
        "/home/me/.local/state/forged",
        "/home/me/.local/state/forged/forged.sock",
    )


def test_root_has_its_own_default_paths() -> None:
    config = load(None, NOTHING, {}, 0)
    assert (config.data_dir, config.socket) == (ROOT_DATA_DIR, ROOT_SOCKET)


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, 'data_dir = "/a"\nsocket = "/a/s"\nsocket_mode = 0o600', data_dir="/b", socket=None)
    assert (config.data_dir, config.socket, config.socket_mode) == ("/b", "/a/s", 0o600)


def test_valid_flag_replaces_an_invalid_file_setting(tmp_path: Path) -> None:
    assert read(tmp_path, 'listen = ["nowhere"]', listen=["127.0.0.1:0"]).listen == ("127.0.0.1:0",)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, {"data_dir": "state", "socket": "s", "plugin_dir": "p"}, HOME, USER)
    places = (config.data_dir, config.socket, config.plugin_dir)
    assert places == (str(tmp_path / "state"), str(tmp_path / "s"), str(tmp_path / "p"))


def test_integer_is_accepted_for_a_float_setting(tmp_path: Path) -> None:
    assert read(tmp_path, "drain_timeout_s = 3").drain_timeout_s == 3


def test_file_with_all_settings_is_accepted(tmp_path: Path) -> None:
    text = """
        listen = ["tls://0.0.0.0:7433", "tcp://127.0.0.1:0"]
        http = "127.0.0.1:9090"
        tls_certificate = "/c"
        tls_key = "/k"
        tls_client_ca = "/ca"
        unix_other_role = "viewer"
        anonymous_loopback_role = "none"
        plugins.webhook.url = "https://hooks.example"
        [certificate_roles]
        host-a = "operator"
    """
    config = read(tmp_path, text)
    assert (config.certificate_roles, config.anonymous_loopback_role) == ({"host-a": "operator"}, "none")
    assert config.plugins == {"webhook": {"url": "https://hooks.example"}}


def test_empty_address_disables_its_listener(tmp_path: Path) -> None:
    config = read(tmp_path, "listen = []\nhttp = ''")
    assert (config.listen, config.http) == ((), "")


@pytest.mark.parametrize("text", [b"", b"\n", b"# nothing", b"\xef\xbb\xbf# with a mark", b"\r\n\r\n"])
def test_empty_file_is_valid(tmp_path: Path, text: bytes) -> None:
    assert read(tmp_path, text) == load(None, NOTHING, HOME, USER)


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, b'\xef\xbb\xbfdata_dir = "/a"\r\nsocket = "/s"\r\n').data_dir == "/a"


def test_pipe_is_accepted_at_the_start(tmp_path: Path) -> None:
    receiving, sending = os.pipe()
    os.write(sending, b"drain_timeout_s = 3")
    os.close(sending)
    try:
        assert load(Path(f"/dev/fd/{receiving}"), NOTHING, HOME, USER).drain_timeout_s == 3
    finally:
        os.close(receiving)


# What is wrong, and where.


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = '''\
# socket = 5
data_dire = "/typo"
log_level = """
socket = 5
"""
socket = 5
socket_mode = 0o7777
listen = [
    "tcp://127.0.0.1:1", # hello_timeout_s = true
    "nowhere",
    "unix:///s",
]
unix_other_role = "böss"
tls_certificate = "/c"
hello_timeout_s = true
connections_max = nan
plugins.event-log.enabled = "yes"
[plugins.webhook]
url = "u"
limits = { a = inf }
[certificate_roles]
host-a = "none"
"host.b" = "viewer"
"host.c" = ["worker"]
'''
    for end in ("\n", "\r\n"):
        wrong = problems(tmp_path, text.replace("\n", end))
        assert [(problem.line, problem.key) for problem in wrong] == [
            (2, "data_dire"),
            (3, "log_level"),
            (6, "socket"),
            (7, "socket_mode"),
            (8, "listen"),
            (8, "listen"),
            (13, "unix_other_role"),
            (14, "tls_certificate"),
            (15, "hello_timeout_s"),
            (16, "connections_max"),
            (17, "plugins.event-log.enabled"),
            (20, "plugins.webhook.limits.a"),
            (21, "certificate_roles"),
            (22, "certificate_roles.host-a"),
            (24, "certificate_roles.host.c"),
        ]


def test_problem_names_file_line_value_and_fix(tmp_path: Path) -> None:
    error = refusal(lambda: read(tmp_path, "\n\nin_flight_max = 0\ndrain_timeout_s = 'x'"))
    assert str(error).splitlines() == [
        f"{tmp_path / 'forged.toml'} is not a valid configuration (fix these keys)",
        "  line 3: in_flight_max must be 1 to 1000000, got 0",
        "  line 4: drain_timeout_s must be a number, 0 to 3600, got 'x'",
    ]


def test_problem_after_a_byte_order_mark_has_the_right_line(tmp_path: Path) -> None:
    error = refusal(lambda: read(tmp_path, b"\xef\xbb\xbfin_flight_max = 0\nsocket_mode = true"))
    assert [problem.line for problem in error.problems] == [1, 2]


def test_invalid_flag_is_reported_like_a_key(tmp_path: Path) -> None:
    assert wrong_keys(tmp_path, "", listen=["nowhere"]) == ["listen"]


def test_problem_of_a_flag_names_the_command_line(tmp_path: Path) -> None:
    text = "listen = []\nsocket_mode = 'x'"
    wrong = problems(tmp_path, text, listen=["nowhere"])
    assert [(problem.key, problem.line, problem.place) for problem in wrong] == [
        ("socket_mode", 2, ""),
        ("listen", None, "the command line"),
    ]
    assert str(wrong[1]).startswith("the command line: listen must be ")


@pytest.mark.parametrize("with_file", [True, False])
def test_problem_of_a_flag_does_not_name_the_file(tmp_path: Path, with_file: bool) -> None:
    path = write(tmp_path, "listen = []") if with_file else None
    error = refusal(lambda: load(path, {"http": "nowhere"}, HOME, USER))
    assert error.message == "the command line is not a valid configuration"


def test_problem_report_has_a_bounded_length(tmp_path: Path) -> None:
    error = refusal(lambda: read(tmp_path, "".join(f"x{number} = 1\n" for number in range(10_000))))
    assert len(error.problems) == PROBLEMS_MAX
    assert f"and {10_000 - PROBLEMS_MAX} more" in str(error)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"data_dir = ", "Invalid value (at end of document); the invalid statement begins at line 1"),
        (b"socket_mode = 1\n\nlisten = [\n'a',\n", "; the invalid statement begins at line 3"),
        (b"a = 1\nb = '''\nc = 1\n", "; the invalid statement begins at line 2"),
        (b"a = 1\nb = x\n", "(at line 2, column 5)"),
        (b"a = 1\na = 2\n", "(at line 2, column 6)"),
        (b"[t]\n[t]\n", "(at line 2, column 3)"),
        (b"a = 1\nb = '\xff\xfe'\n", "byte 0xff is not UTF-8 (at line 2)"),
        (b"\xff\xfe", "byte 0xff is not UTF-8 (at line 1)"),
        (b"a = 1\nb = " + b"[" * 10_000, "it is nested too deeply; the invalid statement begins at line 2"),
        (b"a = 1\n\nb = " + b"9" * 10_000, "; the invalid statement begins at line 3"),
        (b"\0", "(at line 1, column 1)"),
        (b"{}", "(at line 1, column 1)"),
    ],
)
def test_invalid_toml_is_reported_with_its_position(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    error = refusal(lambda: load(path, NOTHING, HOME, USER))
    assert error.code == "config_not_toml"
    assert error.message.startswith(f"{path}: ")
    assert error.message.endswith(said)


@pytest.mark.parametrize("name", ["absent.toml", ".", "forged.toml/below", "loop", "x" * 300])
def test_error_for_an_unreadable_path_names_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, "")
    (tmp_path / "loop").symlink_to("loop")
    error = refusal(lambda: load(tmp_path / name, NOTHING, HOME, USER))
    assert error.code == "config_unreadable"
    assert str(tmp_path) in error.message


@NO_ROOT
def test_error_for_a_file_without_read_permission_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.chmod(0)
    assert "Permission denied" in str(refusal(lambda: load(path, NOTHING, HOME, USER)))


def test_directory_as_file_is_refused_and_leaves_no_open_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - the listing's own descriptor counts both times
    for _ in range(10):
        refusal(lambda: load(tmp_path, NOTHING, HOME, USER))
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("line", [b"# %s\n" % (b"x" * 98), b"x = 1\n"])
def test_a_file_of_a_megabyte_is_refused_before_it_is_parsed(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, line * (1_000_000 // len(line)))
    error = refusal(lambda: load(path, NOTHING, HOME, USER))
    assert (error.code, str(FILE_BYTES_MAX) in error.message) == ("config_too_large", True)


def test_endless_file_is_read_up_to_a_limit() -> None:
    assert refusal(lambda: load(Path("/dev/zero"), NOTHING, HOME, USER)).code == "config_too_large"


def test_file_of_the_maximum_size_is_read(tmp_path: Path) -> None:
    text = b"drain_timeout_s = 3\n"
    assert read(tmp_path, text + b"#" * (FILE_BYTES_MAX - len(text))).drain_timeout_s == 3


# Where keys are.


def test_source_finds_the_line_of_a_key_or_its_table() -> None:
    source = SettingsFile(Path("f"), "a = 1\n[plugins.webhook]\nurl = 'u'\n")
    keys = ["a", "plugins.webhook.url", "plugins.webhook.url.deeper", "plugins.webhook.none", "none", "", "plugins.b"]
    assert [source.line_of(key) for key in keys] == [1, 3, 3, 2, None, None, 2]


def test_later_problems_have_their_line_too(tmp_path: Path) -> None:
    path = write(tmp_path, "\n[plugins.webhook]\nurl = 'ftp://'\n")
    read_once = settings(path, http="127.0.0.1:1")
    problem = Problem("plugins.webhook.url", "ftp://", "an https URL")
    assert read_once.locate(problem) == problem
    read_once.load()
    assert read_once.locate(problem) == replace(problem, line=3)
    assert read_once.locate(Problem("http", "x", "y")).place == "the command line"


# Again, while the daemon runs.


class Writer:
    """Writes into the file whenever the reader pauses; what is None removes it."""

    def __init__(self, path: Path, *contents: str | None) -> None:
        self.path = path
        self.contents = list(contents)
        self.pauses = 0

    def __call__(self) -> None:
        self.pauses += 1
        if self.contents:
            content = self.contents.pop(0)
            if content is None:
                self.path.unlink()
            else:
                self.path.write_text(content)


def test_reload_reads_the_current_file(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    daemon = settings(path, socket="/s")
    before = daemon.load()
    write(tmp_path, "drain_timeout_s = 2")
    assert daemon.reload() == replace(before, drain_timeout_s=2)


def test_reload_of_an_unchanged_file_returns_equal_settings(tmp_path: Path) -> None:
    daemon = settings(write(tmp_path, "data_dir = 'd'\nlisten = []\n[plugins.a]\nb = [{c = 1}]\n"))
    assert daemon.load() == daemon.reload() == daemon.reload()


def test_reload_without_a_file_changes_nothing() -> None:
    writer = Writer(Path("/nowhere"))
    daemon = settings(None, writer, http="127.0.0.1:1")
    assert daemon.load() == daemon.reload()
    assert writer.pauses == 0


def test_reload_ignores_a_changed_directory_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "# nothing")
    environment = dict(HOME)
    daemon = SettingsReader(Path("forged.toml"), {}, environment, USER, pause=lambda: None)
    before = daemon.load()
    monkeypatch.chdir("/")
    environment["HOME"] = "/elsewhere"
    assert daemon.reload() == before


def test_reload_waits_until_the_file_stops_changing(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    writer = Writer(path, "drain_ti", "", None, "drain_timeout_s = 2\nhttp", "drain_timeout_s = 2\n")
    assert settings(path, writer).reload().drain_timeout_s == 2
    assert writer.pauses == 6


def test_reload_refuses_a_file_that_keeps_changing(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    writer = Writer(path, *(f"drain_timeout_s = {number}" for number in range(100)))
    assert refusal(settings(path, writer).reload).code == "config_unsettled"
    assert writer.pauses == READS_MAX


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "config_empty"), (None, "config_unreadable"), ("a = ", "config_not_toml"), ("a = 1", "config_invalid")],
)
def test_reload_refuses_an_invalid_file_and_keeps_the_previous_settings(
    tmp_path: Path, content: str | None, code: str
) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    daemon = settings(path)
    config, source = daemon.load(), daemon.source
    Writer(path, content)()
    assert refusal(daemon.reload).code == code
    assert daemon.source is source
    write(tmp_path, "drain_timeout_s = 1")
    assert daemon.reload() == config


def test_problems_of_a_reload_have_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    daemon = settings(path)
    daemon.load()
    write(tmp_path, "\ndrain_timeout_s = 'x'\nsocket = 5\n")
    assert [problem.line for problem in refusal(daemon.reload).problems] == [2, 3]


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_reload_refuses_a_path_that_is_no_longer_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "forged.toml"
    with socket.socket(socket.AF_UNIX) as door:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            door.bind(str(path))
        assert refusal(settings(path).reload).code == "config_unreadable"


def test_derived_settings_are_not_reported_as_changes(tmp_path: Path) -> None:
    def fewer(config: Config) -> Config:
        return replace(config, connections_max=min(config.connections_max, 10))

    path = write(tmp_path, "connections_max = 4000")
    daemon = SettingsReader(path, {}, HOME, USER, adapt=fewer, pause=lambda: None)
    assert daemon.load() == daemon.reload()
    write(tmp_path, "connections_max = 5")
    assert daemon.reload().connections_max == 5


def test_defaults_do_not_depend_on_the_settings(tmp_path: Path) -> None:
    path = write(tmp_path, "data_dir = '/d'")
    assert settings(path, socket="/s").defaults == load(None, NOTHING, HOME, USER)
