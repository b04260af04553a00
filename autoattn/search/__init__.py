"""From a problem to a cache entry: propose, render, compile, check, time, choose."""
