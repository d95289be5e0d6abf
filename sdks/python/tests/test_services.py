"""Between the JSON of the API and the records of services."""

from __future__ import annotations

from cloche import HealthCheck, ServiceDefinition, _wire_services


def test_a_health_check_has_what_was_given() -> None:
    assert _wire_services.health(HealthCheck(tcp=5432)) == {"tcp": 5432}
    check = HealthCheck(http=80, path="/up", status=204, interval=2, start_period=0, on_unhealthy="report")
    assert _wire_services.health(check) == {
        "http": {"port": 80, "path": "/up", "status": 204},
        "interval_seconds": 2,
        "start_period_seconds": 0,
        "on_unhealthy": "report",
    }
    assert _wire_services.health(HealthCheck(command=("pg_isready", "-q"))) == {"command": ["pg_isready", "-q"]}


def test_what_a_server_tells() -> None:
    told = {"name": "web", "state": "backoff", "waiting_for": ["db"], "last_exit": {"exit_code": 3}, "new": 1}
    info = _wire_services.service(told)
    assert (info.name, info.state, info.waiting_for, info.last_exit_code) == ("web", "backoff", ("db",), 3)
    assert info.pid is None
    assert info.raw["new"] == 1
    page = _wire_services.page({"lines": [{"line": "a"}, {"line": "b"}], "next": "4.0f", "more": True, "gap_bytes": 7})
    assert (page.lines, page.next, page.more, page.gap_bytes, page.final) == (("a", "b"), "4.0f", True, 7, False)


def test_definitions_of_a_create() -> None:
    web = ServiceDefinition("web", ("serve", "-p", "80"), depends_on=("db",), health=HealthCheck(tcp=80), stop_grace=0)
    assert _wire_services.definitions([web, {"name": "db", "command": "db", "autostart": False}]) == [
        {
            "name": "web",
            "command": ["serve", "-p", "80"],
            "depends_on": ["db"],
            "health": {"tcp": 80},
            "stop_grace_seconds": 0,
        },
        {"name": "db", "command": "db", "autostart": False},
    ]
    assert _wire_services.definitions(None) is None
    more = ServiceDefinition("a", "x", more={"stop_signal": "INT"})
    assert _wire_services.definition(more) == {"command": "x", "stop_signal": "INT"}
