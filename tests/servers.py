"""Servers on loopback that tests share trials through: PostgreSQL and Optuna's gRPC proxy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "tuner", "s3cret{x}%y"  # braces and percent signs mean something to Optuna and to URLs
QUOTED = "s3cret{x}%25y"
PROXY = "import sys; from optuna.storages import get_storage, run_grpc_proxy_server as run; "


@dataclass(frozen=True)
class Postgres:
    """A running PostgreSQL server."""

    port: int
    binaries: Path
    folder: Path

    def database(self) -> str:
        """The URL of a fresh database."""
        import psycopg

        name = f"d{uuid.uuid4().hex}"
        facts: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": PASSWORD}
        with psycopg.connect(**facts, dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{USER}:{QUOTED}@127.0.0.1:{self.port}/{name}"


def why_no_postgres() -> str | None:
    """Why there can be none, in words."""
    if _binaries() is None:
        return "needs PostgreSQL's initdb and pg_ctl (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "needs psycopg (pip install 'autoattn[postgresql]')"
    return None


def _binaries() -> Path | None:
    found = [Path(path).resolve().parent for path in [shutil.which("pg_ctl")] if path is not None]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((path for path in found if (path / "initdb").exists() and (path / "pg_ctl").exists()), None)


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise AssertionError("no unprivileged user to run PostgreSQL as")


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A server with a password, in a temporary folder, on loopback only."""
    binaries, who = _binaries(), _unprivileged()
    assert binaries is not None
    folder = Path(tempfile.mkdtemp(prefix="autoattn-postgres-"))  # which that user can reach, unlike pytest's
    (folder / "password").write_text(PASSWORD)
    if who:
        for path in (folder, folder / "password"):
            os.chown(path, who["user"], who["group"])
    port = free_port()
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    data = folder / "data"
    quiet: dict[str, Any] = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL, **who}
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", USER, "--pwfile", folder / "password", "-A", "scram-sha-256", "-N"],
            **quiet,
        )
        subprocess.run([binaries / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start"], **quiet)
        yield Postgres(port=port, binaries=binaries, folder=folder)
    finally:
        stop = [binaries / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"]
        subprocess.run(stop, stderr=subprocess.DEVNULL, **{**quiet, "check": False})
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def proxy(storage: str) -> Iterator[str]:
    """Optuna's gRPC proxy before a storage; gives its URL."""
    port = free_port()
    code = f"{PROXY} run(get_storage(sys.argv[1]), host='127.0.0.1', port={port})"
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, storage])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    reason = why_no_postgres()
    if reason is not None:
        pytest.skip(reason)
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def grpc_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("grpc", reason="needs grpcio (pip install 'autoattn[grpc]')")
    with proxy(f"sqlite:///{tmp_path_factory.mktemp('proxy') / 'trials.db'}") as url:
        yield url
