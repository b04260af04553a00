"""Which kernel, or which backend of PyTorch, answers a call, and why."""
