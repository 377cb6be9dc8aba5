from __future__ import annotations

import msgspec
import pytest

from forged.auth.model import Role
from forged.config.messages import (
    REQUESTS,
    ConfigRefused,
    ConfigReloaded,
    ConfigView,
    ReloadConfig,
    Reloaded,
    Setting,
    ShowConfig,
)
from forged.kernel.messages import Request


@pytest.mark.parametrize("request_type", REQUESTS)
def test_only_an_operator_of_the_whole_daemon_may_ask(request_type: type[Request[object]]) -> None:
    assert (request_type.needs, request_type.job_field) == (Role.OPERATOR, None)


def test_what_they_answer_is_known() -> None:
    assert (ShowConfig.reply_type(), ReloadConfig.reply_type()) == (ConfigView, Reloaded)


def test_a_view_comes_over_the_wire_as_what_it_was() -> None:
    view = ConfigView(None, [Setting(key="plugins", value={"a": [1]}, default={}, live=False, wanted=["x"])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=ConfigView) == view


def test_a_refusal_matters_more_to_whoever_reads_the_log_than_a_reload() -> None:
    assert (ConfigReloaded.level, ConfigRefused.level) == ("info", "warning")
