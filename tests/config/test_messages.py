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
def test_config_requests_need_an_operator_of_all_jobs(request_type: type[Request[object]]) -> None:
    assert (request_type.needs, request_type.job_field) == (Role.OPERATOR, None)


def test_config_requests_declare_their_reply_types() -> None:
    assert (ShowConfig.reply_type(), ReloadConfig.reply_type()) == (ConfigView, Reloaded)


def test_config_view_survives_encoding() -> None:
    view = ConfigView(None, [Setting(key="plugins", value={"a": [1]}, default={}, live=False, wanted=["x"])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=ConfigView) == view


def test_config_refused_has_a_higher_log_level_than_config_reloaded() -> None:
    assert (ConfigReloaded.level, ConfigRefused.level) == ("info", "warning")
