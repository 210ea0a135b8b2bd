"""What every test needs: that an interrupt is one, even where a shell had it ignored in the background."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
