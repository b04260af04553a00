"""The command line, `autoattn`: a module for each command, and what they share."""

import sys
from typing import NoReturn

from autoattn.cli.exit_codes import INTERRUPTED

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the program on the arguments of the process and exits."""
    try:
        from autoattn.cli import app  # which may be interrupted while it loads
    except KeyboardInterrupt:
        print("autoattn: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(app.run(sys.argv[1:]))
