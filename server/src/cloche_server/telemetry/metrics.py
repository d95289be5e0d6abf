"""Every metric the server exports, in one table; `/metrics` serves this registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REGISTRY = CollectorRegistry()

http_requests = Counter(
    "cloche_http_requests_total", "Requests answered", ["method", "route", "status"], registry=REGISTRY
)
http_seconds = Histogram(
    "cloche_http_request_seconds",
    "Time to answer a request",
    ["method", "route"],
    buckets=_FAST,
    registry=REGISTRY,
)
creates = Counter("cloche_sandbox_creates_total", "Sandboxes created", ["boot_mode"], registry=REGISTRY)
create_failures = Counter("cloche_sandbox_create_failures_total", "Creates that failed", ["code"], registry=REGISTRY)
create_seconds = Histogram(
    "cloche_sandbox_create_seconds",
    "Time to create a sandbox",
    ["boot_mode"],
    buckets=_FAST,
    registry=REGISTRY,
)
ends = Counter("cloche_sandbox_ends_total", "Sandboxes ended", ["reason"], registry=REGISTRY)
sandboxes = Gauge("cloche_sandboxes", "Sandboxes by status", ["status"], registry=REGISTRY)
pool = Gauge("cloche_pool_machines", "Machines waiting in a pool", ["kind"], registry=REGISTRY)
execs = Counter("cloche_execs_total", "Commands ended", ["reason"], registry=REGISTRY)
exec_seconds = Histogram("cloche_exec_seconds", "Time a command took", buckets=_FAST, registry=REGISTRY)
file_bytes = Counter("cloche_file_bytes_total", "Bytes of files moved", ["direction"], registry=REGISTRY)
restored = Counter("cloche_adopted_total", "Sandboxes found again at start", ["outcome"], registry=REGISTRY)
events = Counter("cloche_events_total", "Events written to the journal", ["type"], registry=REGISTRY)
webhook_deliveries = Counter(
    "cloche_webhook_deliveries_total", "Attempts to deliver an event, by outcome", ["outcome"], registry=REGISTRY
)
audit_lost = Counter("cloche_audit_lost_total", "Entries that the audit log had no room for", registry=REGISTRY)
certificate_orders = Counter(
    "cloche_certificate_orders_total", "Certificates of previews asked for, by outcome", ["outcome"], registry=REGISTRY
)
certificates = Gauge(
    "cloche_certificates",
    "Names of previews by the state of their certificate (good, overdue, expired, missing)",
    ["state"],
    registry=REGISTRY,
)


def render() -> bytes:
    """The registry in the Prometheus text format."""
    return generate_latest(REGISTRY)
