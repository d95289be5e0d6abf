"""The network of a sandbox on the wire. What the document says here is checked by `core/policy_input.py`, which has the
better sentences."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, StringConstraints

from cloche_server.api.wire_base import Wire
from cloche_server.core.groups import PATTERN
from cloche_server.core.network import MAX_RULES

_Name = Annotated[str, StringConstraints(strict=True, max_length=254)]
_Port = Annotated[StrictInt, Field(ge=1, le=65535)]
_Span = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9]{1,5}(-[0-9]{1,5})?$")]


#: The sentence for what is none comes from `core/groups.py`; this is for the document.
GroupName = Annotated[str, StringConstraints(strict=True), Field(json_schema_extra={"pattern": PATTERN})]


class RuleBody(Wire):
    id: Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$")] | None = Field(
        None, description="Stands in the log; default: `rule-N`, counted from 1."
    )
    action: Literal["allow", "deny"] = Field(description="What happens to what matches.")
    domain: _Name | None = Field(None, description="A name, or `*.name` for all names below it.")
    cidr: Annotated[str, StringConstraints(strict=True, max_length=64)] | None = Field(
        None, description="An address or a network. The only way to what is not public."
    )
    ports: Annotated[list[_Port | _Span], Field(max_length=64)] | None = Field(
        None, description="Ports or `from-to`. Default: with a domain 80 and 443, else all."
    )
    protocol: Literal["tcp", "udp", "any"] | None = Field(
        None,
        description="Default: any, which denies both and allows TCP. UDP is allowed by `udp` only, with its ports.",
    )
    methods: (
        Annotated[list[Annotated[str, StringConstraints(strict=True, max_length=32)]], Field(max_length=64)] | None
    ) = Field(None, description="HTTP methods; HTTPS is then read on the host, by a certificate of the workspace.")
    paths: (
        Annotated[list[Annotated[str, StringConstraints(strict=True, max_length=1024)]], Field(max_length=64)] | None
    ) = Field(None, description="HTTP paths, exact or with a final `*`; HTTPS as with `methods`.")


class NetworkLimitsBody(Wire):
    bandwidth_kbps: Annotated[StrictInt, Field(ge=0, le=10**9)] = Field(
        0, description="Kilobits per second in each direction; 0 = no limit."
    )
    connections: Annotated[StrictInt, Field(ge=0, le=10**9)] = Field(0, description="Open at once; 0 = no limit.")
    total_mb: Annotated[StrictInt, Field(ge=0, le=10**9)] = Field(
        0, description="MiB in both directions since the machine was started; 0 = no limit."
    )


class NetworkBody(Wire):
    mode: Literal["none", "allow-list", "open"] = Field(
        description="`none`: nothing, names included. `allow-list`: what a rule allows. `open`: every public address "
        "that no rule denies."
    )
    rules: Annotated[list[RuleBody], Field(max_length=MAX_RULES)] = Field(
        default_factory=list, description="The first that matches decides."
    )
    limits: NetworkLimitsBody | None = Field(None, description="What is carried at most.")
    learn: StrictBool = Field(False, description="Remember what is asked for, for `GET …/network/proposal`.")


class GrantBody(Wire):
    secret: Annotated[str, StringConstraints(strict=True, max_length=128)] = Field(description="Its name.")
    hosts: Annotated[list[_Name], Field(min_length=1, max_length=64)] = Field(
        description="Names or `*.name`: the value goes nowhere else."
    )
    env: Annotated[str, StringConstraints(strict=True, max_length=128)] | None = Field(
        None, description="The variable that holds the placeholder."
    )
    placeholder: Annotated[str, StringConstraints(strict=True, max_length=1024)] | None = Field(
        None, description="What the sandbox has instead of the value; default: a random one."
    )
    methods: (
        Annotated[list[Annotated[str, StringConstraints(strict=True, max_length=32)]], Field(max_length=64)] | None
    ) = Field(None, description="Only in requests of these methods.")
    paths: (
        Annotated[list[Annotated[str, StringConstraints(strict=True, max_length=1024)]], Field(max_length=64)] | None
    ) = Field(None, description="Only in requests of these paths, exact or with a final `*`.")
    headers: (
        Annotated[list[Annotated[str, StringConstraints(strict=True, max_length=128)]], Field(max_length=64)] | None
    ) = Field(None, description="Only in these header fields.")
    places: Annotated[list[Literal["header", "query", "body"]], Field(max_length=3)] | None = Field(
        None, alias="in", description="Where in a request; default: header."
    )
    pass_hosts: Annotated[list[_Name], Field(max_length=64)] | None = Field(
        None, description="Where the placeholder itself may go."
    )


class GrantAnswer(BaseModel):
    secret: str
    placeholder: str
    hosts: list[str]
    env: str | None = None
    methods: list[str] | None = None
    paths: list[str] | None = None
    headers: list[str] | None = None
    places: list[str] = Field(alias="in")
    pass_hosts: list[str] | None = None


class RuleAnswer(BaseModel):
    id: str
    action: Literal["allow", "deny"]
    domain: str | None = None
    cidr: str | None = None
    ports: list[int | str] | None = None
    protocol: Literal["tcp", "udp"] | None = None
    methods: list[str] | None = None
    paths: list[str] | None = None


class NetworkLimitsAnswer(BaseModel):
    bandwidth_kbps: int
    connections: int
    total_mb: int


class NetworkAnswer(BaseModel):
    mode: Literal["none", "allow-list", "open"]
    rules: list[RuleAnswer]
    limits: NetworkLimitsAnswer
    learn: bool


class NetworkChangedAnswer(NetworkAnswer):
    cut: int = Field(description="Connections that were open and are not allowed any more.")


class DecisionAnswer(BaseModel):
    """One decision. A connection has a second entry, with `end` and its bytes."""

    seq: int
    at: str = Field(json_schema_extra={"format": "date-time"})
    kind: str = Field(description="`dns`, `tcp`, `udp`, `http` or `secret`.")
    verdict: Literal["allow", "deny"]
    rule: str = Field(description="Id of the rule that decided, or `default`, `mode`, `private-address`, …")
    reason: str
    name: str = ""
    address: str = ""
    port: int = 0
    protocol: str = ""
    method: str = ""
    path: str = ""
    connection: int = 0
    end: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0


class NetworkLogAnswer(BaseModel):
    entries: list[DecisionAnswer]
    next: int = Field(description="`after` of the next question.")
    lost: int = Field(description="Entries before these that are not kept any more.")


class ExplainAnswer(BaseModel):
    allowed: bool
    rule: str
    reason: str
    step: str = Field(description="What decided: `name`, `address`, `connection` or `request`.")


class ProposalAnswer(BaseModel):
    mode: Literal["allow-list"]
    rules: list[RuleAnswer]


EXPLAIN_HOST: dict[str, Any] = {"minLength": 1, "maxLength": 254}
