"""All use cases in one hand, for the HTTP front."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cloche_server.app.access import Access
from cloche_server.app.archive_import import Importer
from cloche_server.app.audit import Audit
from cloche_server.app.budget_verbs import BudgetVerbs
from cloche_server.app.code import Codes
from cloche_server.app.create import Creator
from cloche_server.app.events import Events
from cloche_server.app.exec import Execs
from cloche_server.app.export import Exporter
from cloche_server.app.filelinks import FileLinks
from cloche_server.app.files import Files
from cloche_server.app.filetools import FileTools
from cloche_server.app.fork import Forks
from cloche_server.app.git import Git
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.logs import Logs
from cloche_server.app.meter import Meters
from cloche_server.app.names import NamedCreates
from cloche_server.app.network import NetworkVerbs
from cloche_server.app.ports import Ports
from cloche_server.app.processes import Processes
from cloche_server.app.promote_template import Promoter
from cloche_server.app.restore import Restores
from cloche_server.app.run_jobs import RunJobs
from cloche_server.app.runs import Runs
from cloche_server.app.sandbox_services import SandboxServices
from cloche_server.app.secrets import Secrets
from cloche_server.app.selftest import SelfTests
from cloche_server.app.sleep import SleepVerbs
from cloche_server.app.snapshots import Snapshots
from cloche_server.app.sshkeys import SshAddress, SshKeys
from cloche_server.app.stop import StopVerbs
from cloche_server.app.templates import Templates
from cloche_server.app.terminal import Terminals
from cloche_server.app.tokens import Tokens
from cloche_server.app.webhooks import Webhooks
from cloche_server.core.records import Isolation
from cloche_server.host.clock import Clock
from cloche_server.settings import Settings


@dataclass(slots=True)
class Services:
    """What the API may do. `ready` is set when creates are served, `stopping` when the server ends."""

    settings: Settings
    clock: Clock
    isolation: Isolation
    access: Access
    creator: Creator
    creates: NamedCreates
    lifecycle: LifecycleVerbs
    sleep: SleepVerbs
    power: StopVerbs
    forks: Forks
    snapshots: Snapshots
    restores: Restores
    promoter: Promoter
    exporter: Exporter
    importer: Importer
    execs: Execs
    processes: Processes
    units: SandboxServices
    terminals: Terminals
    codes: Codes
    files: Files
    file_tools: FileTools
    file_links: FileLinks
    git: Git
    logs: Logs
    templates: Templates
    tokens: Tokens
    ssh_keys: SshKeys
    events: Events
    webhooks: Webhooks
    secrets: Secrets
    meters: Meters
    budgets: BudgetVerbs
    network: NetworkVerbs
    selftests: SelfTests
    ports: Ports
    runs: Runs
    run_jobs: RunJobs
    #: Where SSH is served; None: it is not.
    ssh: SshAddress | None = None
    #: None: no audit log is kept.
    audit: Audit | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
