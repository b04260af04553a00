"""Servers on loopback that tests share trials through: PostgreSQL, MariaDB or MySQL, and Optuna's gRPC proxy."""

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
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psycopg

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
        name = f"d{uuid.uuid4().hex}"
        with self._administrator() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{USER}:{QUOTED}@127.0.0.1:{self.port}/{name}"

    def cut(self, url: str) -> None:
        """Ends the connections to a database."""
        with self._administrator() as connection:
            select = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(select, [url.rpartition("/")[2]])

    @contextlib.contextmanager
    def shut(self, url: str) -> Iterator[None]:
        """A database that cuts its connections and takes no others."""
        name = url.rpartition("/")[2]
        with self._administrator() as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            self.cut(url)
            yield
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    def _administrator(self) -> psycopg.Connection[Any]:
        import psycopg

        facts: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": PASSWORD}
        return psycopg.connect(**facts, dbname="postgres", autocommit=True)


def why_no_postgres() -> str | None:
    """Why there can be none, in words."""
    if _binaries() is None:
        return "needs PostgreSQL's initdb and pg_ctl (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "needs psycopg (pip install 'autoattn[postgresql]')"
    return None


def _binaries() -> Path | None:
    folders = [Path(path).resolve().parent for path in [shutil.which("pg_ctl")] if path is not None]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((path for path in folders if (path / "initdb").exists() and (path / "pg_ctl").exists()), None)


def _unprivileged(wanted: str) -> dict[str, Any]:
    """Database servers refuse to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in (wanted, "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise AssertionError(f"no unprivileged user to run {wanted} as")


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A server with a password, in a temporary folder, on loopback only."""
    binaries, who = _binaries(), _unprivileged("postgres")
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
        stop: list[Any] = [binaries / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"]
        subprocess.run(stop, stderr=subprocess.DEVNULL, **{**quiet, "check": False})
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class MySQL:
    """A running MariaDB or MySQL server."""

    port: int

    def database(self) -> str:
        """The URL of a fresh database."""
        name = f"d{uuid.uuid4().hex}"
        with self._administrator() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return f"mysql://{USER}:{QUOTED}@127.0.0.1:{self.port}/{name}"

    def let_in(self) -> None:
        """Makes the user that tests sign in as; the root has no password."""
        with self._administrator() as cursor:
            cursor.execute(f"CREATE USER '{USER}'@'127.0.0.1' IDENTIFIED BY %s", [PASSWORD])
            cursor.execute(f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1'")

    def cut(self, url: str) -> None:
        """Ends the connections to a database."""
        with self._administrator() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [url.rpartition("/")[2]])
            for (number,) in cursor.fetchall():
                cursor.execute(f"KILL {number}")

    @contextlib.contextmanager
    def shut(self, url: str) -> Iterator[None]:
        """A server that cuts its connections and takes no others."""
        with self._administrator() as cursor:
            cursor.execute(f"ALTER USER '{USER}'@'127.0.0.1' ACCOUNT LOCK")
            self.cut(url)
            yield
            cursor.execute(f"ALTER USER '{USER}'@'127.0.0.1' ACCOUNT UNLOCK")

    @contextlib.contextmanager
    def _administrator(self) -> Iterator[Any]:
        import pymysql

        with pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True) as connection:
            yield connection.cursor()


def why_no_mysql() -> str | None:
    """Why there can be none, in words."""
    if _mysqld() is None:
        return "needs mariadbd or mysqld (apt-get install mariadb-server)"
    if importlib.util.find_spec("pymysql") is None:
        return "needs PyMySQL (pip install 'autoattn[mysql]')"
    return None


def _mysqld() -> str | None:
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    return next((path for name in ("mariadbd", "mysqld") if (path := shutil.which(name, path=places))), None)


@contextlib.contextmanager
def mysql() -> Iterator[MySQL]:
    """A server with a password, in a temporary folder, on loopback only."""
    daemon, who = _mysqld(), _unprivileged("mysql")
    assert daemon is not None
    folder = Path(tempfile.mkdtemp(prefix="autoattn-mysql-"))
    if who:
        os.chown(folder, who["user"], who["group"])
    port, data, process = free_port(), f"--datadir={folder / 'data'}", None
    # Servers that share a folder for temporary tables remove each other's.
    quiet: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "TMPDIR": str(folder)}, **who}
    quiet |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}", "--skip-name-resolve"]
    options += [f"--pid-file={folder / 'pid'}", f"--log-error={folder / 'log'}", "--innodb-flush-log-at-trx-commit=0"]
    make = [daemon, "--no-defaults", data, "--initialize-insecure"]
    if (mariadb := shutil.which("mariadb-install-db")) is not None:
        make = [mariadb, "--no-defaults", data, "--auth-root-authentication-method=normal", "--skip-name-resolve"]
    try:
        subprocess.run(make, check=True, **quiet)
        process = subprocess.Popen([daemon, "--no-defaults", data, *options], **quiet)
        _wait_for(port, process)
        server = MySQL(port=port)
        server.let_in()
        yield server
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def proxy(storage: str) -> Iterator[str]:
    """Optuna's gRPC proxy before a storage; gives its URL."""
    port = free_port()
    code = f"{PROXY} run(get_storage(sys.argv[1]), host='127.0.0.1', port={port})"
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, storage])
    try:
        _wait_for(port, process)
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    reason = why_no_postgres()
    if reason is not None:
        pytest.skip(reason)
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MySQL]:
    reason = why_no_mysql()
    if reason is not None:
        pytest.skip(reason)
    with mysql() as server:
        yield server


@pytest.fixture(scope="session")
def grpc_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("grpc", reason="needs grpcio (pip install 'autoattn[grpc]')")
    with proxy(f"sqlite:///{tmp_path_factory.mktemp('proxy') / 'trials.db'}") as url:
        yield url
