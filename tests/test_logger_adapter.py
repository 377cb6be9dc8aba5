"""What a training script sees of its worker."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from forged.logger_adapter import SCRIPT_LOG
from forged.worker.events import Event

NOT_CONFIGURED = """
from forged.logger_adapter import SCRIPT_LOG

SCRIPT_LOG.debug("a detail")
SCRIPT_LOG.info("a note")
SCRIPT_LOG.warning("look at it some time", why="it is odd")
SCRIPT_LOG.error("look at it now")
"""


class UnprintableValue:
    def __str__(self) -> str:
        raise ValueError("it cannot be shown")


def fails(value: int) -> None:
    raise ValueError(f"{value} is a mistake")


def test_unconfigured_script_logs_warnings_and_errors_to_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_CONFIGURED], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "forged: look at it some time (why=it is odd)",
        "forged: look at it now",
    ]


def test_a_script_may_configure_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    assert not SCRIPT_LOG.hears("info")
    with caplog.at_level(logging.INFO, "forged"):
        assert SCRIPT_LOG.hears("info")
        SCRIPT_LOG.info("retrying a request to the daemon", why="it was away")
    assert caplog.record_tuples == [
        ("forged", logging.INFO, "forged: retrying a request to the daemon (why=it was away)")
    ]


def test_bound_fields_are_logged_with_every_event(caplog: pytest.LogCaptureFixture) -> None:
    SCRIPT_LOG.bind(job="run").warning("it is late", by="a minute")
    assert caplog.messages == ["forged: it is late (job=run, by=a minute)"]


def test_failing_subscriber_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    event: Event[int] = Event("counted", SCRIPT_LOG)
    event.subscribe(fails)
    event.fire(7)
    assert caplog.messages == ["forged: a subscriber failed (event_name=counted, reason=ValueError: 7 is a mistake)"]
    assert 'raise ValueError(f"{value} is a mistake")' in caplog.text


def test_warning_of_a_handled_error_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        fails(7)
    except ValueError:
        SCRIPT_LOG.warning("that did not work")
    assert "Traceback" not in caplog.text


def test_unprintable_value_does_not_break_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    # As in a script: what pytest has hung in raises, so that a test notices.
    monkeypatch.setattr(logging.getLogger("forged"), "propagate", False)
    SCRIPT_LOG.warning("it is odd", what=UnprintableValue())


def test_importing_the_package_does_not_configure_logging() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, forged; print('logging' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
