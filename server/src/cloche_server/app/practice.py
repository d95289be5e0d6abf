"""What warm machines practise while nobody wants them: what users do soon, and what takes long the first time.

A fresh machine has no file in its page cache that was not there at the bake, and under emulation none of its code is
translated: its first Python takes three times as long as the second. It leaves nothing but the caches.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cloche_server.app.machines import Slot, run_quietly
from cloche_server.core import code
from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient

#: A directory that is new and goes again, with a file: as a run leaves its program.
_FOLDER: Final = "/tmp/.cloche-practice"  # noqa: S108 - in a machine that nobody is in yet
_FILE: Final = f"{_FOLDER}/main.py"
_PROGRAM: Final = b"import sys\nprint('ready', file=sys.stdout)\n"
#: A kernel has so long for a cell.
_SECONDS: Final = 30.0
#: Programs that a template has not are no error. More rounds did not make it quicker.
COMMANDS: Final = (("python3", _FILE),)


async def practise(slot: Slot) -> None:
    """Raises what calls of the guest raise. Cancelled, it ends its command, and the folder is removed all the same."""
    guest = slot.guest
    try:
        await guest.mkdir(_FOLDER, parents=True)
        await guest.write_file(_FILE, _PROGRAM)
        for argv in COMMANDS:
            await run_quietly(guest, argv)
    finally:
        await guest.delete(_FOLDER, recursive=True)
    await _kernel(guest)


async def _kernel(guest: GuestClient) -> None:
    """A cell that leaves no trace, where there is a code interpreter."""
    try:
        stream = await guest.tunnel(code.CODE_PORT, timeout=_SECONDS)
    except ClocheError as error:
        if error.code != "port.closed":
            raise
        return
    reader = code.FrameReader()
    try:
        async with asyncio.timeout(_SECONDS):
            await stream.write(code.frame({"op": "practise"}))
            while (data := await stream.read()) and not reader.feed(data):
                pass
    except (ConnectionError, TimeoutError, ClocheError):
        pass  # a kernel that is not well says so to whoever uses it
    finally:
        stream.close()
