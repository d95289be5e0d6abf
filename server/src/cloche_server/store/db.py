"""One SQLite connection on one thread: every statement goes through here, in order.

WAL with `synchronous=NORMAL`: a commit survives `kill -9` of the server without an fsync on the hot path;
a power cut may take the last commits, and with them the machines they describe.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cloche_server.core.errors import ClocheError
from cloche_server.store.sql import load_migrations, load_queries

_T = TypeVar("_T")
Row = Mapping[str, Any]


class Conflict(Exception):
    """A conditional update met another version of its row, or an insert met an existing one."""


class Database:
    """The database of one server. `run` executes a function with the connection on its thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._queries = load_queries()
        self._connection: sqlite3.Connection | None = None
        #: There was none before.
        self.new = False

    async def open(self) -> None:
        """Opens the file, and migrates it when it is older. Raises `internal` when it is newer than us, or
        damaged: what is not a whole database must never be taken for one without sandboxes."""
        await self.run(lambda _: None, opening=True)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=10)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            self.new = _migrate(connection)
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._unusable(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _unusable(self, error: sqlite3.DatabaseError) -> ClocheError:
        told = _translate(error)
        if told.code == "host.disk_full":
            return told
        if isinstance(error, sqlite3.OperationalError):
            return ClocheError("internal", f"the database {self._path} cannot be opened: {error}")
        return ClocheError(
            "internal",
            f"the database {self._path} is damaged ({error}); restore it, or move it away together with its "
            "-wal and -shm files to begin without the sandboxes and tokens that are in it",
        )

    async def run(self, work: Callable[[sqlite3.Connection], _T], *, opening: bool = False) -> _T:
        def call() -> _T:
            if self._connection is None:
                if not opening:
                    raise RuntimeError("the database is not open")
                self._connection = self._open()
            return work(self._connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.IntegrityError as error:
            raise Conflict from error
        except sqlite3.Error as error:
            raise _translate(error) from error

    async def fetch(self, name: str, /, **values: object) -> list[Row]:
        """The rows of a named query, as mappings."""
        statement = self._queries[name]
        return await self.run(lambda c: [dict(row) for row in c.execute(statement, values).fetchall()])

    async def fetch_together(self, *queries: tuple[str, Mapping[str, object]]) -> list[list[Row]]:
        """The rows of several named queries, of one moment: nothing is written between them."""
        statements = [(self._queries[name], values) for name, values in queries]
        return await self.run(
            lambda c: [[dict(row) for row in c.execute(text, values).fetchall()] for text, values in statements]
        )

    async def execute(self, name: str, /, **values: object) -> int:
        """Runs a named statement; the number of rows it touched."""
        statement = self._queries[name]
        return await self.run(lambda c: c.execute(statement, values).rowcount)

    async def execute_all(
        self, statements: Sequence[tuple[str, Mapping[str, object]]], *, conditional: bool = False
    ) -> list[int]:
        """Runs several named statements in one transaction; the rows each touched. `conditional`: the first one has
        to touch a row, else nothing is done and `Conflict` is raised."""

        def work(connection: sqlite3.Connection) -> list[int]:
            connection.execute("BEGIN IMMEDIATE")
            try:
                counts = []
                for name, values in statements:
                    counts.append(connection.execute(self._queries[name], values).rowcount)
                    if conditional and counts[0] != 1:
                        raise Conflict
                connection.execute("COMMIT")
            except BaseException:
                _roll_back(connection)
                raise
            return counts

        return await self.run(work)

    async def close(self) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.close()
            self._connection = None

        if self._connection is not None:
            await self.run(work)
        self._thread.shutdown(wait=False)


#: Without room also the shared memory of the log cannot be made or grown.
_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMMAP,
}


def _translate(error: sqlite3.Error) -> ClocheError:
    code = getattr(error, "sqlite_errorcode", None)
    if code in _FULL_CODES:
        return ClocheError("host.disk_full", "the disk of the host is full, the change could not be recorded")
    return ClocheError("internal", "the database of the server refused an operation")


def _roll_back(connection: sqlite3.Connection) -> None:
    """A full disk ends a transaction in the middle, or leaves it open at its commit; it never stays open."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _migrate(connection: sqlite3.Connection) -> bool:
    """True when there was nothing before."""
    migrations = load_migrations()
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(migrations):
            raise ClocheError(
                "internal",
                f"the database has schema {version}, this server knows {len(migrations)}; use a newer server",
            )
        for number, script in migrations[version:]:
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number:d}")
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise
    return bool(version == 0)


def _statements(script: str) -> list[str]:
    """The statements of a script. Not `executescript`: that one commits the open transaction."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";") if part.strip()]
