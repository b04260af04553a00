"""The command line: `autoattn tune | show | explain | render | verify | report | devices`."""

from autoattn.cli.app import main

__all__ = ["main"]
