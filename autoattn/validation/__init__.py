"""The gate: a kernel's numbers against the reference."""
