from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forged.config import DEFAULT_LISTEN, Config, Settings, Source, load
from forged.config.source import FILE_BYTES_MAX, PROBLEMS_MAX, READS_MAX
from forged.errors import ConfigError, Problem
from forged.paths import ROOT_DATA_DIR, ROOT_SOCKET
from tests.config.files import HOME, NOTHING, USER, problems, read, write, wrong_keys

NO_ROOT = pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")


def settings(path: Path | None, pause: Callable[[], None] = lambda: None, **overrides: Any) -> Settings:
    return Settings(path, overrides, HOME, USER, pause=pause)


def refusal(act: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        act()
    return caught.value


# What holds.


def test_without_a_file_everything_is_as_it_is_by_default() -> None:
    config = load(None, NOTHING, HOME, USER)
    assert config.listen == (f"tcp://{DEFAULT_LISTEN}",)
    assert (config.data_dir, config.socket) == (
        "/home/me/.local/state/forged",
        "/home/me/.local/state/forged/forged.sock",
    )


def test_root_has_places_of_its_own() -> None:
    config = load(None, NOTHING, {}, 0)
    assert (config.data_dir, config.socket) == (ROOT_DATA_DIR, ROOT_SOCKET)


def test_a_file_s_settings_stand_over_the_defaults_and_the_flags_over_both(tmp_path: Path) -> None:
    config = read(tmp_path, 'data_dir = "/a"\nsocket = "/a/s"\nsocket_mode = 0o600', data_dir="/b", socket=None)
    assert (config.data_dir, config.socket, config.socket_mode) == ("/b", "/a/s", 0o600)


def test_a_flag_mends_what_the_file_says(tmp_path: Path) -> None:
    assert read(tmp_path, 'listen = ["nowhere"]', listen=["127.0.0.1:0"]).listen == ("127.0.0.1:0",)


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, {"data_dir": "state", "socket": "s", "plugin_dir": "p"}, HOME, USER)
    places = (config.data_dir, config.socket, config.plugin_dir)
    assert places == (str(tmp_path / "state"), str(tmp_path / "s"), str(tmp_path / "p"))


def test_a_whole_number_will_do_where_a_number_is_wanted(tmp_path: Path) -> None:
    assert read(tmp_path, "drain_timeout_s = 3").drain_timeout_s == 3


def test_everything_at_once_is_accepted(tmp_path: Path) -> None:
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


def test_no_address_means_no_listening_there(tmp_path: Path) -> None:
    config = read(tmp_path, "listen = []\nhttp = ''")
    assert (config.listen, config.http) == ((), "")


@pytest.mark.parametrize("text", [b"", b"\n", b"# nothing", b"\xef\xbb\xbf# with a mark", b"\r\n\r\n"])
def test_a_file_may_say_nothing(tmp_path: Path, text: bytes) -> None:
    assert read(tmp_path, text) == load(None, NOTHING, HOME, USER)


def test_a_mark_of_utf_8_and_lines_of_another_system_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, b'\xef\xbb\xbfdata_dir = "/a"\r\nsocket = "/s"\r\n').data_dir == "/a"


def test_the_first_time_a_pipe_will_do(tmp_path: Path) -> None:
    receiving, sending = os.pipe()
    os.write(sending, b"drain_timeout_s = 3")
    os.close(sending)
    try:
        assert load(Path(f"/dev/fd/{receiving}"), NOTHING, HOME, USER).drain_timeout_s == 3
    finally:
        os.close(receiving)


# What is wrong, and where.


def test_every_mistake_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
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


def test_a_mistake_names_the_file_the_line_the_value_and_what_would_be_right(tmp_path: Path) -> None:
    error = refusal(lambda: read(tmp_path, "\n\nin_flight_max = 0\ndrain_timeout_s = 'x'"))
    assert str(error).splitlines() == [
        f"{tmp_path / 'forged.toml'} is not a valid configuration (fix these keys)",
        "  line 3: in_flight_max must be 1 to 1000000, got 0",
        "  line 4: drain_timeout_s must be a number, 0 to 3600, got 'x'",
    ]


def test_a_mistake_behind_a_mark_of_utf_8_has_the_right_line(tmp_path: Path) -> None:
    error = refusal(lambda: read(tmp_path, b"\xef\xbb\xbfin_flight_max = 0\nsocket_mode = true"))
    assert [problem.line for problem in error.problems] == [1, 2]


def test_a_flag_is_checked_like_a_key(tmp_path: Path) -> None:
    assert wrong_keys(tmp_path, "", listen=["nowhere"]) == ["listen"]


def test_a_mistake_on_the_command_line_is_said_to_be_there(tmp_path: Path) -> None:
    text = "listen = []\nsocket_mode = 'x'"
    wrong = problems(tmp_path, text, listen=["nowhere"])
    assert [(problem.key, problem.line, problem.place) for problem in wrong] == [
        ("socket_mode", 2, ""),
        ("listen", None, "the command line"),
    ]
    assert str(wrong[1]).startswith("the command line: listen must be ")


@pytest.mark.parametrize("with_file", [True, False])
def test_where_only_flags_are_wrong_the_file_is_not_blamed(tmp_path: Path, with_file: bool) -> None:
    path = write(tmp_path, "listen = []") if with_file else None
    error = refusal(lambda: load(path, {"http": "nowhere"}, HOME, USER))
    assert error.message == "the command line is not a valid configuration"


def test_a_file_of_nothing_but_mistakes_is_told_in_a_page(tmp_path: Path) -> None:
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
def test_what_is_no_toml_is_said_to_be_none_and_where(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    error = refusal(lambda: load(path, NOTHING, HOME, USER))
    assert error.code == "config_not_toml"
    assert error.message.startswith(f"{path}: ")
    assert error.message.endswith(said)


@pytest.mark.parametrize("name", ["absent.toml", ".", "forged.toml/below", "loop", "x" * 300])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "")
    (tmp_path / "loop").symlink_to("loop")
    error = refusal(lambda: load(tmp_path / name, NOTHING, HOME, USER))
    assert error.code == "config_unreadable"
    assert str(tmp_path) in error.message


@NO_ROOT
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.chmod(0)
    assert "Permission denied" in str(refusal(lambda: load(path, NOTHING, HOME, USER)))


def test_a_directory_in_its_place_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - the listing's own descriptor counts both times
    for _ in range(10):
        refusal(lambda: load(tmp_path, NOTHING, HOME, USER))
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("line", [b"# %s\n" % (b"x" * 98), b"x = 1\n"])
def test_a_file_of_a_megabyte_is_refused_before_it_is_parsed(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, line * (1_000_000 // len(line)))
    error = refusal(lambda: load(path, NOTHING, HOME, USER))
    assert (error.code, str(FILE_BYTES_MAX) in error.message) == ("config_too_large", True)


def test_what_never_ends_is_not_read_for_ever() -> None:
    assert refusal(lambda: load(Path("/dev/zero"), NOTHING, HOME, USER)).code == "config_too_large"


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    text = b"drain_timeout_s = 3\n"
    assert read(tmp_path, text + b"#" * (FILE_BYTES_MAX - len(text))).drain_timeout_s == 3


# Where keys are.


def test_a_source_knows_the_line_of_a_key_or_of_the_table_it_would_be_in() -> None:
    source = Source(Path("f"), "a = 1\n[plugins.webhook]\nurl = 'u'\n")
    keys = ["a", "plugins.webhook.url", "plugins.webhook.url.deeper", "plugins.webhook.none", "none", "", "plugins.b"]
    assert [source.line_of(key) for key in keys] == [1, 3, 3, 2, None, None, 2]


def test_problems_that_are_found_later_have_their_place_too(tmp_path: Path) -> None:
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


def test_what_the_file_says_by_now_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    daemon = settings(path, socket="/s")
    before = daemon.load()
    write(tmp_path, "drain_timeout_s = 2")
    assert daemon.reload() == replace(before, drain_timeout_s=2)


def test_a_file_that_has_not_changed_says_the_same(tmp_path: Path) -> None:
    daemon = settings(write(tmp_path, "data_dir = 'd'\nlisten = []\n[plugins.a]\nb = [{c = 1}]\n"))
    assert daemon.load() == daemon.reload() == daemon.reload()


def test_without_a_file_everything_stays() -> None:
    writer = Writer(Path("/nowhere"))
    daemon = settings(None, writer, http="127.0.0.1:1")
    assert daemon.load() == daemon.reload()
    assert writer.pauses == 0


def test_another_directory_and_environment_by_then_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "# nothing")
    environment = dict(HOME)
    daemon = Settings(Path("forged.toml"), {}, environment, USER, pause=lambda: None)
    before = daemon.load()
    monkeypatch.chdir("/")
    environment["HOME"] = "/elsewhere"
    assert daemon.reload() == before


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    writer = Writer(path, "drain_ti", "", None, "drain_timeout_s = 2\nhttp", "drain_timeout_s = 2\n")
    assert settings(path, writer).reload().drain_timeout_s == 2
    assert writer.pauses == 6


def test_a_file_that_never_stops_changing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    writer = Writer(path, *(f"drain_timeout_s = {number}" for number in range(100)))
    assert refusal(settings(path, writer).reload).code == "config_unsettled"
    assert writer.pauses == READS_MAX


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "config_empty"), (None, "config_unreadable"), ("a = ", "config_not_toml"), ("a = 1", "config_invalid")],
)
def test_a_bad_file_is_refused_and_what_was_read_before_stays(tmp_path: Path, content: str | None, code: str) -> None:
    path = write(tmp_path, "drain_timeout_s = 1")
    daemon = settings(path)
    config, source = daemon.load(), daemon.source
    Writer(path, content)()
    assert refusal(daemon.reload).code == code
    assert daemon.source is source
    write(tmp_path, "drain_timeout_s = 1")
    assert daemon.reload() == config


def test_every_problem_of_a_reload_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    daemon = settings(path)
    daemon.load()
    write(tmp_path, "\ndrain_timeout_s = 'x'\nsocket = 5\n")
    assert [problem.line for problem in refusal(daemon.reload).problems] == [2, 3]


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_what_is_no_file_any_more_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "forged.toml"
    with socket.socket(socket.AF_UNIX) as door:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            door.bind(str(path))
        assert refusal(settings(path).reload).code == "config_unreadable"


def test_what_the_process_makes_of_the_settings_is_no_change(tmp_path: Path) -> None:
    def fewer(config: Config) -> Config:
        return replace(config, connections_max=min(config.connections_max, 10))

    path = write(tmp_path, "connections_max = 4000")
    daemon = Settings(path, {}, HOME, USER, adapt=fewer, pause=lambda: None)
    assert daemon.load() == daemon.reload()
    write(tmp_path, "connections_max = 5")
    assert daemon.reload().connections_max == 5


def test_the_defaults_are_those_of_the_user_whatever_is_set(tmp_path: Path) -> None:
    path = write(tmp_path, "data_dir = '/d'")
    assert settings(path, socket="/s").defaults == load(None, NOTHING, HOME, USER)
