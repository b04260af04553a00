"""`python -m autoattn`."""

from autoattn.cli import main

main()
