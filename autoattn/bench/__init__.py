"""Benchmarks: kernels, passes, models and ablations, each checked before it is timed."""
