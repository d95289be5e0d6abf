"""Cells that do to their kernel what they should not, show too much, or run as somebody else."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kit.cells import CELLS, Seen
from kit.code_bridge import SOURCE, BridgeClient, bridge

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code() -> AsyncIterator[BridgeClient]:
    folder = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        async with bridge(folder) as client:
            yield client
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", CELLS)
async def test_odd_cells_end_as_they_should_and_the_next_one_works(code: BridgeClient, what: str) -> None:
    cell = CELLS[what]
    cell.check(Seen.told([(event["type"], event) for event in (await code.run(cell.code)).events]))
    assert (await code.run(cell.then[0])).stdout == cell.then[1]
    for number in range(3):
        assert (await code.run(f"{number}")).results == [{"text/plain": str(number)}]
    if cell.spoils:
        await code.ask("restart", context="python")


async def test_what_programs_write_is_in_their_own_cell_and_whole(code: BridgeClient) -> None:
    for number in range(20):
        assert (await code.run(f"!echo n{number}")).stdout == f"n{number}\n"
    ran = await code.run(r"import os; _ = os.system(r'printf \\303; sleep 0.1; printf \\251')")
    assert ran.stdout == "é"


async def test_a_result_that_is_too_large_is_named_and_the_rest_of_it_is_there(code: BridgeClient) -> None:
    text = "from IPython.display import display\n"
    ran = await code.run(text + "display({'image/png': 'A' * 20_000_000, 'text/plain': 'large'}, raw=True)\n3")
    large, value = [event for event in ran.events if event["type"] == "result"]
    assert large["data"] == {"text/plain": "large"}
    assert large["dropped"] == {"image/png": 20_000_000}
    assert value["data"] == {"text/plain": "3"}


async def test_a_directory_that_is_not_there_is_refused(code: BridgeClient, tmp_path: Path) -> None:
    answer = await code.ask("create", language="python", cwd=str(tmp_path / "no"))
    assert (answer["type"], answer["reason"]) == ("refused", "no_directory")
    answer = await code.ask("create", language="python", cwd=str(tmp_path))
    ran = await code.run("import os\nprint(os.getcwd())", context=answer["context"]["id"])
    assert ran.stdout == f"{tmp_path}\n"
    await code.ask("delete", context=answer["context"]["id"])
    assert len((await code.ask("list"))["contexts"]) == 1


WHO = "import os\nprint(os.getuid(), os.getgid(), os.getgroups(), os.environ['HOME'], os.environ['USER'], os.getcwd())"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_kernels_of_other_users(code: BridgeClient) -> None:
    for language, text in (("python", WHO), ("bash", "echo $(id -u) $(id -g) [$(id -G)] $HOME $USER $PWD")):
        await code.ask("delete", context=language)  # whose it is is decided by its first cell
        ran = await code.run(text, language=language, user="0:7", home="/tmp")
        assert ran.stdout.startswith("0 7 [7"), ran.events
        assert ran.stdout.endswith(" /root root /tmp\n")
        await code.ask("delete", context=language)
    for unknown in ("nobody-of-this-name", "root:nobody-of-this-name", "4294967295", ""):
        answer = await code.ask("create", language="python", user=unknown)
        assert answer.get("reason") == ("no_user" if unknown else None), answer
        if not unknown:
            await code.ask("delete", context=answer["context"]["id"])


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SOURCE))
    import accounts as module

    yield module
    sys.modules.pop("accounts", None)


async def test_a_user_is_written_as_for_a_command(accounts: Any) -> None:
    found = accounts.account("nobody")
    assert (found.uid, found.gid, found.name, found.home) == (65534, 65534, "nobody", "/nonexistent")
    assert accounts.account("65534") == found
    assert accounts.account("nobody:7").gid == 7
    assert accounts.account("nobody:7").groups[0] == 7
    other = accounts.account("54321")
    assert (other.uid, other.gid, other.groups, other.name, other.home) == (54321, 0, (0,), "54321", "/")
    assert accounts.account("54321:7").groups == (7,)
    assert accounts.account(None).uid == os.getuid()
    for unknown in ("no-such-user", ":", "nobody:no-such-group", "4294967295", "99999999999", "-1"):
        with pytest.raises(KeyError):
            accounts.account(unknown)
