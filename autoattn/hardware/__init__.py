"""The card and the host of this process: identity, timing, faults."""
