"""Work that several threads do at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(work: Callable[[int], None], count: int = 4) -> None:
    """Runs work(0), work(1), ... in a thread each, and waits for all."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
