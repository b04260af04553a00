"""Storages: what a URL may be, and each way in which a server can refuse, in one sentence without a password."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from servers import QUOTED, MySQL, Postgres, free_port, mysql_server, postgres_server  # noqa: F401
from study_trials import SPACE, trial, variant

from autoattn.errors import AutoattnError, StorageError, UsageError
from autoattn.search import storage
from autoattn.search.shared_trials import Ledger

pytestmark = pytest.mark.sampled


@pytest.fixture(params=["postgres_server", "mysql_server"])
def server(request: pytest.FixtureRequest) -> Postgres | MySQL:
    database_server: Postgres | MySQL = request.getfixturevalue(request.param)
    return database_server


def refusal(act: Callable[[], Any], kind: type[AutoattnError] = StorageError) -> str:
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert "s3cret" not in message
    return message


@pytest.mark.parametrize(
    "url",
    ["", "here.journal", "journal:///x", "redis://:s3cret@host", "postgres://u:s3cret@h/d", "oracle+x://u:s3cret@h"],
)
def test_an_unknown_scheme_names_those_that_are_known(url: str) -> None:
    message = refusal(lambda: storage.server(url), UsageError)
    assert "--storage must be a URL that begins with postgresql://, mysql://, sqlite:/// or grpc://HOST:PORT" in message


@pytest.mark.parametrize("url", ["grpc://host", "grpc://:13000", "grpc://host:", "grpc://host:port"])
def test_a_proxy_needs_a_host_and_a_port(url: str) -> None:
    assert "grpc://HOST:PORT" in refusal(lambda: storage.server(url), UsageError)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql://me:s3cret@db:5432/trials?sslmode=require&password=s3cret", "postgresql://me@db:5432/trials"),
        ("mysql+pymysql://me:s3@cret/x@db/trials", "mysql+pymysql://me@db/trials"),
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
        ("grpc://host:13000", "grpc://host:13000"),
    ],
)
def test_a_password_is_never_shown(url: str, text: str) -> None:
    assert storage.shown(url) == text


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("postgresql://u:s3cret@127.0.0.1/d", "psycopg", "postgresql"),
        ("mysql://u:s3cret@127.0.0.1/d", "pymysql", "mysql"),
        ("grpc://127.0.0.1:1", "grpc", "grpc"),
        ("grpc://127.0.0.1:1", "google.protobuf", "grpc"),
    ],
)
def test_a_missing_driver_says_what_to_install(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    message = refusal(lambda: storage.server(url))
    assert f"needs the Python package {package}, which is not installed" in message
    assert f"pip install 'autoattn[{extra}]'" in message


def test_a_driver_that_a_url_names_and_nobody_has_is_refused() -> None:
    assert "needs a driver that is not installed" in refusal(lambda: storage.server("mysql+nosuch://u:s3cret@h/d"))


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "grpc"])
def test_a_server_that_does_not_answer_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"postgresql": "psycopg", "mysql": "pymysql", "grpc": "grpc"}[scheme])
    monkeypatch.setattr(storage, "CONNECT_SECONDS", 1)
    port = free_port()
    url = f"grpc://127.0.0.1:{port}" if scheme == "grpc" else f"{scheme}://u:s3cret@127.0.0.1:{port}/d"
    message = refusal(lambda: storage.server(url))
    assert f"127.0.0.1:{port}" in message
    assert "must answer, but" in message
    assert "start its server, or correct --storage" in message


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "unable to open" in refusal(lambda: storage.server(f"sqlite:///{tmp_path / 'none' / 'trials.db'}"))


def test_a_wrong_password_is_said_to_be_wrong(server: Postgres | MySQL) -> None:
    url = server.database()
    message = refusal(lambda: storage.server(url.replace(QUOTED, "s3cret-of-another")))
    assert "must let its user in" in message
    assert "correct the name or the password" in message


def test_a_database_that_is_not_there_is_named(server: Postgres | MySQL) -> None:
    url = server.database()[:-3] + "xyz"
    message = refusal(lambda: storage.server(url))
    assert re.search(rf"must answer, but .*{url[-9:]}.*; start its server, or correct --storage", message)
    assert "(1049" not in message, "MySQL's drivers put a number before the words"


# Tables of another Optuna


@pytest.mark.parametrize(
    ("version", "way"),
    [("v2.4.0.a", "optuna storage upgrade"), ("v99.0.0.a", "install a newer Optuna")],
)
def test_tables_of_another_optuna_are_refused_with_the_way_out(tmp_path: Path, version: str, way: str) -> None:
    path = tmp_path / "trials.db"
    storage.server(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", [version])
    message = refusal(lambda: storage.server(f"sqlite:///{path}"))
    assert f"must be those of Optuna {optuna.__version__}" in message
    assert version in message
    assert way in message


# A server that goes away


def test_a_server_that_goes_away_ends_the_search_in_a_sentence_and_loses_no_trial(server: Postgres | MySQL) -> None:
    url = server.database()
    ledger = Ledger("one", storage.server(url), SPACE)
    assert ledger.claim(variant(2, 2))
    ledger.finish(trial(variant(2, 2)), 1.0)
    assert ledger.claim(variant(4, 4))
    with server.shut(url):
        message = refusal(lambda: ledger.finish(trial(variant(4, 4)), 1.0))
        assert "the same command goes on from there" in message
        assert "must stay readable and writable" in message
        ledger.leave()
    again = Ledger("one", storage.server(url), SPACE)
    assert again.news().finished == [trial(variant(2, 2))]


def test_a_connection_that_was_cut_is_made_again(server: Postgres | MySQL) -> None:
    url = server.database()
    ledger = Ledger("one", storage.server(url), SPACE)
    assert ledger.claim(variant(2, 2))
    server.cut(url)
    ledger.finish(trial(variant(2, 2)), 1.0)
    assert Ledger("one", storage.server(url), SPACE).news().finished == [trial(variant(2, 2))]


@pytest.mark.parametrize("kind", ["postgres_server", "mysql_server", "sqlite"])
def test_a_fresh_database_can_be_opened_by_several_at_once(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}" if kind == "sqlite" else request.getfixturevalue(kind).database()
    start = threading.Barrier(6)

    def opened(_: int) -> Ledger:
        start.wait()
        return Ledger("one", storage.server(url), SPACE)

    with ThreadPoolExecutor(6) as pool:
        ledgers = list(pool.map(opened, range(6)))
    assert sum(ledger.claim(variant(2, 2)) for ledger in ledgers) == 1
