"""What the program's exit codes mean, beside 0, 1 and 2."""

INTERRUPTED = 130  # 128 + SIGINT, as shells count it
PIPE_CLOSED = 141  # 128 + SIGPIPE
