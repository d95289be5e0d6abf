"""What a process uses, read from `/proc`: two small files, some microseconds each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cloche_server.core.ports import Reading
from cloche_server.core.records import ProcessRef

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def read(ref: ProcessRef) -> Reading | None:
    """CPU time of all threads, ended ones included, and resident memory that is not of a file. None when there is no
    such process; of one that has ended and was not reaped yet, the CPU time is the last word."""
    try:
        stat = Path(f"/proc/{ref.pid}/stat").read_bytes()
        statm = Path(f"/proc/{ref.pid}/statm").read_bytes().split()
    except OSError:
        return None
    # The name in field 2 may hold spaces and parentheses; the last `)` ends it.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if int(fields[19]) != ref.start_time:
        return None
    resident, shared = int(statm[1]), int(statm[2])
    return Reading((int(fields[11]) + int(fields[12])) / _TICKS, max(0, resident - shared) * _PAGE)
