"""Programs in a guest that write all the time, and what must be true of what they have written."""

from __future__ import annotations

import threading
from typing import Self

from kit.client import Box
from kit.lineage import no_disk_errors

#: Appends numbered lines, and tells each one after it is on the disk.
APPENDER = """
import itertools, os
log = os.open("/root/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in itertools.count(1):
    line = b"%d\\n" % number
    os.write(log, line)
    os.fsync(log)
    os.write(1, line)
"""
INSERTER = """
import sqlite3
db = sqlite3.connect("/root/t.db")
db.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, x BLOB)")
while True:
    with db:
        db.execute("INSERT INTO t (x) VALUES (randomblob(300))")
"""
INTEGRITY = "import sqlite3; print(*sqlite3.connect('/root/t.db').execute('PRAGMA integrity_check').fetchone())"
#: Number of lines, and whether they are other than 1, 2, 3…
NUMBERED = "awk '$1 != NR {bad = 1} END {print NR, bad + 0}' /root/log"


class Writers:
    """While the block lasts one program appends lines and one fills a database; both go on behind it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        #: The last line that has reached its caller.
        self.acknowledged = 0
        self._begun, self._enough = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Self:
        self.box.start(["python3", "-c", INSERTER], exec_id="inserter")
        self._thread.start()
        assert self._begun.wait(60), "nothing has been written"
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _follow(self) -> None:
        with self.box.stream(["python3", "-c", APPENDER], exec_id="appender", detach=True) as events:
            for event in events:
                if event.is_output:
                    self.acknowledged = int(event.raw.split()[-1])
                    self._begun.set()
                if self._enough.is_set():
                    return

    def check(self, box: Box, acknowledged: int, *, database: bool = True) -> None:
        """In a copy of the sandbox, or in itself: no line that was acknowledged is missing, and all is whole."""
        running = {one["exec_id"] for one in box.execs() if one["status"] == "running"}
        for name in running & {"appender", "inserter"}:
            box.kill(name)
        count, bad = (int(word) for word in box.sh(f"sync; echo 1 > /proc/sys/vm/drop_caches; {NUMBERED}").split())
        assert count >= acknowledged > 0
        assert not bad, f"the lines of {box} are not 1 to {count}"
        if database:
            assert box.sh(f'python3 -c "{INTEGRITY}"') == "ok\n"
        no_disk_errors(box)
