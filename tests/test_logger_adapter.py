"""What a training script sees of its worker, and the loggers that callers give."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from forged.client import ElasticWorker
from forged.errors import RequestRefused
from forged.log import LEVELS, SILENT
from forged.logger_adapter import SCRIPT_LOG, as_log
from forged.worker.events import Event
from tests.telemetry.recording_log import RecordingLog

NOT_CONFIGURED = """
from forged.logger_adapter import SCRIPT_LOG

SCRIPT_LOG.debug("a detail")
SCRIPT_LOG.info("a note")
SCRIPT_LOG.warning("look at it some time", reason="it is odd")
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
        "forged: look at it some time (reason=it is odd)",
        "forged: look at it now",
    ]


def test_a_script_may_configure_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    assert not SCRIPT_LOG.hears("info")
    with caplog.at_level(logging.INFO, "forged"):
        assert SCRIPT_LOG.hears("info")
        SCRIPT_LOG.info("retrying a request to the daemon", reason="it was away")
    assert caplog.record_tuples == [
        ("forged", logging.INFO, "forged: retrying a request to the daemon (reason=it was away)")
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


# Loggers of callers.


class RaisingLogger:
    """A logger whose methods raise."""

    def _raise(self, *args: object, **fields: object) -> None:
        raise OSError("the log server is away")

    debug = info = warning = error = log = _raise


def test_fields_are_logged_in_the_text_of_a_standard_logger(caplog: pytest.LogCaptureFixture) -> None:
    for given in (logging.getLogger("mine"), logging.LoggerAdapter(logging.getLogger("mine"), {})):
        caplog.clear()
        with caplog.at_level(logging.INFO, "mine"):
            as_log(given).bind(job="run").info("checkpoint saved", prefix="a", size=3)
        assert caplog.record_tuples == [("mine", logging.INFO, "forged: checkpoint saved (job=run, prefix=a, size=3)")]


def test_disabled_level_of_a_standard_logger_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mine"):
        log = as_log(logging.getLogger("mine"))
        log.info("checkpoint saved")
        assert not log.hears("info")
        assert log.hears("error")
    assert caplog.records == []


def test_logging_itself_stands_for_its_root_logger(caplog: pytest.LogCaptureFixture) -> None:
    as_log(logging).warning("look", at="it")
    assert caplog.record_tuples == [("root", logging.WARNING, "forged: look (at=it)")]


def test_fields_stay_fields_of_a_structlog_logger() -> None:
    with capture_logs() as logged:
        log = as_log(structlog.get_logger())
        log.bind(job="run").info("checkpoint saved", prefix="a")
        log.error("it failed")
    assert logged == [
        {"event": "checkpoint saved", "log_level": "info", "job": "run", "prefix": "a"},
        {"event": "it failed", "log_level": "error"},
    ]


def test_filtering_structlog_logger_tells_its_level() -> None:
    log = as_log(structlog.wrap_logger(RaisingLogger(), wrapper_class=structlog.make_filtering_bound_logger(30)))
    assert (log.hears("info"), log.hears("warning")) == (False, True)
    log.info("it is filtered")


def test_recording_log_keeps_events_of_its_level() -> None:
    recorded = RecordingLog(level="warning")
    log = as_log(recorded)
    log.bind(job="run").warning("look")
    assert (log.hears("info"), recorded.of("look")) == (False, [{"job": "run"}])


def test_no_logger_is_silent() -> None:
    assert as_log(None) is SILENT
    assert as_log(SILENT) is SILENT
    assert as_log(SCRIPT_LOG) is SCRIPT_LOG


@pytest.mark.parametrize("given", [5, "info", print, RaisingLogger])
def test_logger_without_the_four_methods_is_refused(given: object) -> None:
    with pytest.raises(RequestRefused, match="logger must have the methods debug, info, warning and error") as caught:
        as_log(given)
    assert caught.value.code == "logger_invalid"


@pytest.mark.parametrize("level", LEVELS)
def test_error_of_a_logger_is_printed_once_and_not_raised(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = as_log(RaisingLogger())
    for _ in range(3):
        getattr(log.bind(job="run"), level)("checkpoint saved", prefix="a")
    told = capsys.readouterr().err
    assert told == "forged: the logger RaisingLogger failed: OSError: the log server is away\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_error_of_a_logger_is_not_raised_without_stderr(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    as_log(RaisingLogger()).error("checkpoint saved")


def test_raising_handler_or_filter_of_a_standard_logger_is_not_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.Logger("mine", logging.INFO)

    def refuse(record: logging.LogRecord) -> bool:
        raise OSError("the log server is away")

    logger.addFilter(refuse)
    as_log(logger).info("checkpoint saved", prefix="a")
    assert capsys.readouterr().err == "forged: the logger Logger failed: OSError: the log server is away\n"


def test_interrupt_inside_a_logger_is_raised() -> None:
    class Interrupted(RaisingLogger):
        def info(self, *args: object, **fields: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        as_log(Interrupted()).info("checkpoint saved")


def test_worker_takes_standard_and_structlog_loggers() -> None:
    for given in (logging.getLogger("mine"), structlog.get_logger(), RaisingLogger(), None):
        assert ElasticWorker("a", log=given).worker_id.id == "a"
