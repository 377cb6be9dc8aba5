from __future__ import annotations

import os
from pathlib import Path

import pytest

from forged.errors import ConfigError
from forged.systemd.notify import STATUS_CHARS_MAX, Notifier
from tests.systemd.service_manager import FakeServiceManager, service_manager_in


def test_the_manager_hears_how_the_daemon_is_from_start_to_stop(manager: FakeServiceManager) -> None:
    notifier = manager.notifier
    notifier.ready("serving")
    notifier.status("3 jobs")
    notifier.watchdog()
    notifier.reloading(123_456)
    notifier.ready("serving again")
    notifier.stopping("draining")
    assert manager.received() == [
        ["READY=1", "STATUS=serving"],
        ["STATUS=3 jobs"],
        ["WATCHDOG=1"],
        ["RELOADING=1", "MONOTONIC_USEC=123456", "STATUS=3 jobs"],
        ["READY=1", "STATUS=serving again"],
        ["STOPPING=1", "STATUS=draining"],
    ]


def test_a_daemon_that_stops_has_nothing_else_to_say_than_that_it_is_alive(manager: FakeServiceManager) -> None:
    notifier = manager.notifier
    notifier.stopping("draining")
    notifier.status("3 jobs")
    notifier.reloading(123_456)
    notifier.ready("serving again")
    notifier.watchdog()
    assert manager.received() == [["STOPPING=1", "STATUS=draining"], ["WATCHDOG=1"]]


def test_a_long_stop_asks_for_the_time_that_it_takes(manager: FakeServiceManager) -> None:
    manager.notifier.stopping("draining", within_s=90.5)
    assert manager.received() == [["STOPPING=1", "EXTEND_TIMEOUT_USEC=90500000", "STATUS=draining"]]


def test_an_abstract_socket_is_an_address_too() -> None:
    with FakeServiceManager(f"@forged-test-{os.getpid()}") as manager:
        manager.notifier.watchdog()
        assert manager.received() == [["WATCHDOG=1"]]


def test_children_do_not_inherit_the_address(manager: FakeServiceManager) -> None:
    environment = manager.environment | {"HOME": "/"}
    assert Notifier.from_environment(environment).active
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_a_manager_nothing_is_told(environment: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment)
    for tell in (notifier.ready, notifier.stopping, notifier.status):
        tell("to nobody")
    notifier.reloading(1)
    notifier.watchdog()
    notifier.retry()
    assert (notifier.active, notifier.has_unsent) == (False, False)


@pytest.mark.parametrize("address", ["@", "/", "relative", "vsock:2:1"])
def test_an_address_that_is_none_is_the_operators_to_mend(address: str) -> None:
    environment = {"NOTIFY_SOCKET": address}
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        Notifier.from_environment(environment)
    assert environment == {}


def test_a_status_that_is_shown_is_not_sent_again(manager: FakeServiceManager) -> None:
    notifier = manager.notifier
    for text in ("a", "a", "b", "a"):
        notifier.status(text)
    notifier.ready("c")
    notifier.status("c")
    assert manager.received() == [["STATUS=a"], ["STATUS=b"], ["STATUS=a"], ["READY=1", "STATUS=c"]]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\nlines\r\n\tREADY=1", "two lines READY=1"),
        ("", ""),
        ("half a pair \udc80", "half a pair ?"),
        ("ü" * 5000, "ü" * STATUS_CHARS_MAX),
    ],
)
def test_a_status_is_one_line_of_valid_text(manager: FakeServiceManager, text: str, line: str) -> None:
    manager.notifier.ready(text)
    assert manager.received() == [["READY=1", f"STATUS={line}"]]


class TestABusyManager:
    """One that reads nothing for a while: nothing waits for it."""

    def test_hears_in_the_end_that_the_daemon_is_ready(self, manager: FakeServiceManager) -> None:
        waiting, notifier = manager.fill_queue(), manager.notifier
        notifier.ready("serving")
        assert notifier.has_unsent
        assert len(manager.received()) == waiting
        notifier.retry()
        assert not notifier.has_unsent
        assert manager.received() == [["READY=1", "STATUS=serving"]]
        notifier.retry()
        assert manager.received() == []

    def test_hears_it_before_anything_that_came_later(self, manager: FakeServiceManager) -> None:
        manager.fill_queue()
        notifier = manager.notifier
        notifier.ready("serving")
        manager.received()
        notifier.watchdog()
        assert manager.received() == [["READY=1", "STATUS=serving"], ["WATCHDOG=1"]]
        manager.fill_queue()
        notifier.ready("serving again")
        manager.received()
        notifier.status("3 jobs")
        assert manager.received() == [["READY=1", "STATUS=serving again"], ["STATUS=3 jobs"]]

    def test_hears_only_where_the_daemon_stands_now(self, manager: FakeServiceManager) -> None:
        manager.fill_queue()
        notifier = manager.notifier
        notifier.reloading(1)
        notifier.ready("serving")
        manager.received()
        notifier.retry()
        assert manager.received() == [["READY=1", "STATUS=serving"]]

    def test_misses_a_status_and_hears_the_next(self, manager: FakeServiceManager) -> None:
        manager.fill_queue()
        notifier = manager.notifier
        notifier.status("lost")
        assert not notifier.has_unsent
        manager.received()
        notifier.status("lost")
        assert manager.received() == [["STATUS=lost"]]


def test_a_manager_that_is_gone_hears_it_when_it_is_back(tmp_path: Path) -> None:
    with service_manager_in(tmp_path) as manager:
        notifier = manager.notifier
    notifier.ready("serving")
    (tmp_path / "notify").unlink()
    notifier.retry()
    notifier.watchdog()
    assert notifier.has_unsent
    with service_manager_in(tmp_path) as manager:
        notifier.retry()
        assert manager.received() == [["READY=1", "STATUS=serving"]]


def test_an_address_that_is_too_long_is_survived() -> None:
    notifier = Notifier(f"/{'x' * 200}")
    notifier.ready("serving")
    assert notifier.has_unsent
