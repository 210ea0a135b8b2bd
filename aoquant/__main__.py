"""The console script, and `python -m aoquant`."""

from __future__ import annotations

import signal
import sys


def run() -> None:
    """Run one command and exit with its code."""
    try:
        from aoquant.cli import main
    except KeyboardInterrupt:  # before `main` could take care of signals
        sys.stderr.write("error: interrupted\nhint: nothing was left behind\n")
        sys.exit(130)
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and Python's own end is no place for a traceback
    sys.exit(code)


if __name__ == "__main__":
    run()
