"""Worker processes, and the job that compiles a kernel in one."""
