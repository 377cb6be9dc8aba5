"""What holds for all tests.

A shell without job control starts what runs in the background with Ctrl-C ignored, and so would every process that a
test starts and interrupts. And a busy machine is no failure: no example of a property has to be quick.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("forged", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forged")
