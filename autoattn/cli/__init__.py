"""The command line, `autoattn`: a module for each command, and what they share."""

from autoattn.cli.app import main

__all__ = ["main"]
