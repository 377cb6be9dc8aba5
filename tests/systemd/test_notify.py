from __future__ import annotations

import os
from pathlib import Path

import pytest

from forged.errors import ConfigError
from forged.systemd.notify import STATUS_CHARS_MAX, Notifier
from tests.systemd.service_manager import FakeServiceManager, service_manager_in


def test_notifications_cover_the_daemon_from_start_to_stop(manager: FakeServiceManager) -> None:
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


def test_stopping_daemon_sends_only_watchdog_messages(manager: FakeServiceManager) -> None:
    notifier = manager.notifier
    notifier.stopping("draining")
    notifier.status("3 jobs")
    notifier.reloading(123_456)
    notifier.ready("serving again")
    notifier.watchdog()
    assert manager.received() == [["STOPPING=1", "STATUS=draining"], ["WATCHDOG=1"]]


def test_long_stop_extends_the_timeout(manager: FakeServiceManager) -> None:
    manager.notifier.stopping("draining", within_s=90.5)
    assert manager.received() == [["STOPPING=1", "EXTEND_TIMEOUT_USEC=90500000", "STATUS=draining"]]


def test_abstract_socket_address_is_accepted() -> None:
    with FakeServiceManager(f"@forged-test-{os.getpid()}") as manager:
        manager.notifier.watchdog()
        assert manager.received() == [["WATCHDOG=1"]]


def test_children_do_not_inherit_the_address(manager: FakeServiceManager) -> None:
    environment = manager.environment | {"HOME": "/"}
    assert Notifier.from_environment(environment).active
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_nothing_is_sent_without_a_notification_socket(environment: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment)
    for tell in (notifier.ready, notifier.stopping, notifier.status):
        tell("no socket")
    notifier.reloading(1)
    notifier.watchdog()
    notifier.retry()
    assert (notifier.active, notifier.has_unsent) == (False, False)


@pytest.mark.parametrize("address", ["@", "/", "relative", "vsock:2:1"])
def test_invalid_notification_address_is_a_config_error(address: str) -> None:
    environment = {"NOTIFY_SOCKET": address}
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        Notifier.from_environment(environment)
    assert environment == {}


def test_unchanged_status_is_not_sent_again(manager: FakeServiceManager) -> None:
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

    def test_receives_readiness_after_its_queue_has_room(self, manager: FakeServiceManager) -> None:
        waiting, notifier = manager.fill_queue(), manager.notifier
        notifier.ready("serving")
        assert notifier.has_unsent
        assert len(manager.received()) == waiting
        notifier.retry()
        assert not notifier.has_unsent
        assert manager.received() == [["READY=1", "STATUS=serving"]]
        notifier.retry()
        assert manager.received() == []

    def test_receives_readiness_before_later_messages(self, manager: FakeServiceManager) -> None:
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

    def test_receives_only_the_latest_state(self, manager: FakeServiceManager) -> None:
        manager.fill_queue()
        notifier = manager.notifier
        notifier.reloading(1)
        notifier.ready("serving")
        manager.received()
        notifier.retry()
        assert manager.received() == [["READY=1", "STATUS=serving"]]

    def test_misses_a_status_and_receives_the_next(self, manager: FakeServiceManager) -> None:
        manager.fill_queue()
        notifier = manager.notifier
        notifier.status("lost")
        assert not notifier.has_unsent
        manager.received()
        notifier.status("lost")
        assert manager.received() == [["STATUS=lost"]]


def test_restarted_manager_receives_the_unsent_state(tmp_path: Path) -> None:
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


def test_too_long_address_does_not_raise() -> None:
    notifier = Notifier(f"/{'x' * 200}")
    notifier.ready("serving")
    assert notifier.has_unsent
