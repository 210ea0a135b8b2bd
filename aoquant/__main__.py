"""The console script, and `python -m aoquant`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run one command and exit with its code."""
    try:
        from aoquant.cli import main
    except KeyboardInterrupt:  # before `main` could take care of signals
        sys.stderr.write("error: interrupted\nhint: nothing was left behind\n")
        sys.exit(130)
    sys.exit(main())


if __name__ == "__main__":
    run()
