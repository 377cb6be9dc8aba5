"""What holds for all tests.

A shell without job control starts what runs in the background with Ctrl-C ignored, and so would every process that a
test starts and interrupts.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
