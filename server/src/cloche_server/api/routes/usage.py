"""What sandboxes have used, and budgets that limit it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cloche_server.api import present_usage
from cloche_server.api.context import OnlySandbox, SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.scopes import narrowed
from cloche_server.api.wire_usage import BudgetAnswer, BudgetBody, UsageAnswer, UsageSum
from cloche_server.core.budgets import Budget
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import SECRET_METADATA_PREFIX

router = APIRouter(tags=["usage"])

_TIME: dict[str, Any] = {"format": "date-time"}


def budget_of(body: BudgetBody | None) -> Budget | None:
    """The budget that is asked for."""
    return None if body is None else Budget(**body.model_dump())


@router.get(
    "/sandboxes/{sandbox_id}/usage", response_model=UsageAnswer, responses=answers(404), summary="Usage of a sandbox"
)
async def get(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Since its creation until now, or until its end: what has ended is told of for `usage_keep_days`. Wakes nothing
    and is no activity."""
    metered, usage = await services.meters.usage(workspace, sandbox_id)
    return json_response(present_usage.one(metered, usage, present_usage.prices(services.settings)))


def _moment(name: str, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ClocheError(
            "request.invalid",
            f"{name} must be a time with its offset from UTC, such as 2030-01-31T12:00:00Z",
            details={"field": name},
        )
    return moment.timestamp()


@router.get("/usage", response_model=UsageSum, responses=answers(400), name="sum", summary="Usage of the workspace")
async def summed(
    services: ServicesDep,
    workspace: Workspace,
    only: OnlySandbox,
    since: Annotated[
        str | None, Query(description="Only sandboxes that lived then or later.", json_schema_extra=_TIME)
    ] = None,
    until: Annotated[str | None, Query(description="Only sandboxes made before.", json_schema_extra=_TIME)] = None,
    group_by: Annotated[
        str | None, Query(min_length=1, max_length=128, description="Name of a label: a sum for each of its values.")
    ] = None,
    sandbox_id: Annotated[str | None, Query(description="Only this sandbox.")] = None,
) -> Response:
    """Of living sandboxes, and of those that have ended for `usage_keep_days`. `since` and `until` choose sandboxes by
    their lives; what is summed is their whole usage, not the part between the two. Labels are those at the end."""
    if group_by is not None and group_by.startswith(SECRET_METADATA_PREFIX):
        raise ClocheError("request.invalid", "secret labels are never shown", details={"field": "group_by"})
    span = _moment("since", since), _moment("until", until)
    one, place = narrowed(only, sandbox_id, workspace)
    found = await services.meters.sum(place, since=span[0], until=span[1], group_by=group_by, sandbox_id=one)
    about = {
        "workspace": workspace,
        "at": rfc3339(services.clock.now()),
        "since": since,
        "until": until,
        "group_by": group_by,
    }
    return json_response(
        {**without_none(about), **present_usage.summed(found, present_usage.prices(services.settings))}
    )


@router.get(
    "/sandboxes/{sandbox_id}/budget",
    response_model=BudgetAnswer,
    responses=answers(404),
    name="get_budget",
    summary="Budget of a sandbox",
)
async def get_budget(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """What it may use and has used, together with those that share its budget."""
    return json_response(present_usage.budget(await services.budgets.get(workspace, sandbox_id)))


@router.put(
    "/sandboxes/{sandbox_id}/budget",
    response_model=BudgetAnswer,
    responses=answers(400, 402, 404, 413, 500, 507),
    openapi_extra=json_body(BudgetBody),
    name="set_budget",
    summary="Set or raise the budget",
)
async def set_budget(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """All limits anew, for all that share it; what was used stays used. A sandbox that had none is counted from now.
    One that was paused at a limit can be resumed when nothing is used up any more. 402: it is being deleted."""
    budget = budget_of(await read_model(request, BudgetBody))
    assert budget is not None
    return json_response(present_usage.budget(await services.budgets.set(workspace, sandbox_id, budget)))


@router.delete(
    "/sandboxes/{sandbox_id}/budget",
    status_code=204,
    responses=answers(404, 500, 507),
    name="delete_budget",
    summary="Take the budget away",
)
async def delete_budget(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Others that share it keep it. 204 also when there is none."""
    await services.budgets.remove(workspace, sandbox_id)
    return Response(status_code=204)
