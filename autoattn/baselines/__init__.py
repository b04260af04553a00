"""Attention of others: PyTorch's backends and installed packages."""
