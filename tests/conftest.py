"""Configuration of all tests.

A shell without job control starts background jobs with SIGINT ignored, and processes that tests interrupt would inherit
that. Hypothesis deadlines are disabled, because the machine may be busy.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("forged", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forged")
