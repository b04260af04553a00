"""One attention over the ranks of a process group: context parallelism."""
