"""Predicts a kernel's time from its machine code and the facts of a GPU."""
