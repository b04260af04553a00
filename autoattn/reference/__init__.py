"""Eager PyTorch that every kernel is judged by, and random inputs for it."""
