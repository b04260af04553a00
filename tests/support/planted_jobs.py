"""Jobs that go wrong in every way, for the tests of workers; imported by the children, so nothing slow is in here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Echo:
    """Gives back what it was given, with the worker's process id."""

    value: Any = None

    def run(self, memory: dict[Any, Any]) -> tuple[int, Any]:
        return os.getpid(), self.value


@dataclass(frozen=True)
class Nothing:
    """Gives nothing back."""

    def run(self, memory: dict[Any, Any]) -> None:
        return None


@dataclass(frozen=True)
class Count:
    """How many of these its worker has done."""

    def run(self, memory: dict[Any, Any]) -> int:
        memory["count"] = memory.get("count", 0) + 1
        return memory["count"]


@dataclass(frozen=True)
class Environment:
    """What the worker sees of its surroundings."""

    name: str

    def run(self, memory: dict[Any, Any]) -> str | None:
        return os.environ.get(self.name)


@dataclass(frozen=True)
class Niceness:
    """How far the worker stands behind others."""

    def run(self, memory: dict[Any, Any]) -> int:
        return os.nice(0)


@dataclass(frozen=True)
class Card:
    """Which card the worker sees as its first and only one."""

    def run(self, memory: dict[Any, Any]) -> tuple[int, str]:
        import torch

        return torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)


@dataclass(frozen=True)
class Raise:
    """Fails with an exception of its own."""

    words: str

    def run(self, memory: dict[Any, Any]) -> None:
        raise PlantedError(self.words)


@dataclass(frozen=True)
class Refused:
    """Fails as the system does."""

    number: int  # of errno
    path: str | None = None

    def run(self, memory: dict[Any, Any]) -> None:
        raise OSError(self.number, os.strerror(self.number), self.path)


class PlantedError(Exception):
    """What Raise raises."""


@dataclass(frozen=True)
class Exit:
    """Ends its process."""

    how: str

    def run(self, memory: dict[Any, Any]) -> None:
        ends: dict[str, Callable[[], object]] = {
            "abort": os.abort,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "real-time": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3),
            "_exit": lambda: os._exit(3),
            "exit": lambda: sys.exit(4),
            "zero": lambda: os._exit(0),
        }
        ends[self.how]()


@dataclass(frozen=True)
class Greedy:
    """Asks for more memory than it may have."""

    def run(self, memory: dict[Any, Any]) -> int:
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        return len(bytes(2**40))


@dataclass(frozen=True)
class Hang:
    """Writes its process id into a file and never ends; with a child, that one's too."""

    note: Path
    child: bool = False
    stubborn: bool = False  # hears no signal that can be ignored
    locked: bool = False  # holds the interpreter's lock, so that no thread of its process runs

    def run(self, memory: dict[Any, Any]) -> None:
        if self.stubborn:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        pids = [os.getpid()]
        if self.child:
            pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        write(self.note, *pids)
        while True:
            ctypes.PyDLL(None).sleep(600) if self.locked else time.sleep(600)


@dataclass(frozen=True)
class Tally:
    """Counts its runs, and ends its process as told in the first few of them."""

    tally: Path
    end: Any  # another job
    bad: int = 1  # runs

    def run(self, memory: dict[Any, Any]) -> int:
        with self.tally.open("a") as file:
            file.write("x")
        times = len(self.tally.read_text())
        if times <= self.bad:
            self.end.run(memory)
        return times


@dataclass(frozen=True)
class Parent:
    """Starts a child, notes its process id, and ends as told."""

    note: Path
    end: Any  # another job

    def run(self, memory: dict[Any, Any]) -> Any:
        write(self.note, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        return self.end.run(memory)


@dataclass(frozen=True)
class Sleep:
    """Takes a while."""

    seconds: float

    def run(self, memory: dict[Any, Any]) -> float:
        time.sleep(self.seconds)
        return self.seconds


@dataclass(frozen=True)
class Large:
    """A result of so many bytes."""

    size: int

    def run(self, memory: dict[Any, Any]) -> bytes:
        return bytes(self.size)


@dataclass(frozen=True)
class Unpicklable:
    """A result that cannot be sent."""

    def run(self, memory: dict[Any, Any]) -> Any:
        return lambda: None


class Treacherous:
    """What can be sent but not received."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise PlantedError("no way back")


@dataclass(frozen=True)
class Betray:
    """A result that cannot be received."""

    def run(self, memory: dict[Any, Any]) -> Treacherous:
        return Treacherous()


@dataclass(frozen=True)
class Deaf:
    """A job that cannot be received: it unpickles only where it was made."""

    home: int

    def __reduce__(self) -> Any:
        return _at_home, (self.home,)

    def run(self, memory: dict[Any, Any]) -> None:
        return None


def _at_home(home: int) -> Deaf:
    if os.getpid() != home:
        raise PlantedError("only at home")
    return Deaf(home)


@dataclass(frozen=True)
class HangUp:
    """Ends the connection, and stays: as a process that is stuck in the driver on its way out."""

    def run(self, memory: dict[Any, Any]) -> None:
        if os.fork() == 0:
            time.sleep(0.3)
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    socket.socket(fileno=descriptor).shutdown(socket.SHUT_RDWR)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)


def write(note: Path, *pids: int) -> None:
    """Writes at once, so that a reader sees all or nothing."""
    whole = note.with_suffix(".tmp")
    whole.write_text(" ".join(map(str, pids)))
    whole.rename(note)
