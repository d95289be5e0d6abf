"""Messages of Jupyter's protocol as the bridge makes and reads them: also what no kernel would send."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client.session import Session

from kit.code_bridge import SOURCE

pytestmark = pytest.mark.thorough


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bridge_messages", SOURCE / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


messages = _load()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


# Jupyter's own session takes half a second for what has many parts.
@settings(max_examples=25)
@given(content=st.dictionaries(st.text(), JSON, max_size=4), kind=st.text(min_size=1))
def test_jupyters_own_session_reads_it_and_the_other_way(content: dict[str, object], kind: str) -> None:
    signer = messages.Signer()
    session = Session(key=signer.key, check_pid=False)
    message_id, parts = signer.encode(kind, content, {"a": 1}, {"msg_id": "above"})
    _, rest = session.feed_identities(parts)
    told = session.deserialize(rest, content=False)
    assert (told["header"]["msg_id"], told["msg_type"], told["parent_header"]["msg_id"]) == (message_id, kind, "above")
    assert session.unpack(told["content"]) == content
    made = session.msg(kind, content, parent=told)
    read = signer.decode([b"an identity", *session.serialize(made)])
    assert (read.kind, read.parent_id, read.content) == (kind, message_id, content)


@given(st.lists(st.binary(max_size=40) | st.just(b"<IDS|MSG>"), max_size=9))
def test_what_is_not_signed_is_nothing(parts: list[bytes]) -> None:
    assert messages.Signer().decode(parts) is None


@given(st.lists(st.binary(max_size=20) | JSON.map(lambda one: repr(one).encode()), min_size=4, max_size=4))
def test_signed_nonsense_is_nothing_or_a_message(parts: list[bytes]) -> None:
    signer = messages.Signer()
    found = signer.decode([b"<IDS|MSG>", signer._sign(parts), *parts])
    assert found is None or isinstance(found, messages.Message)
