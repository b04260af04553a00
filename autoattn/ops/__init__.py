"""The host side of each operation: one module per stem."""
