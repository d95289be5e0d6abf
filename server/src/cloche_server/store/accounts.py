"""Accounts of budgets and rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from cloche_server.core.budgets import Account, Amounts, Budget
from cloche_server.store.db import Row


def account_row(account: Account) -> dict[str, Any]:
    return {
        "id": account.id,
        "workspace": account.workspace,
        "budget": json.dumps(asdict(account.budget)),
        "closed": json.dumps(asdict(account.closed)),
        "offsets": json.dumps({name: asdict(amounts) for name, amounts in account.offsets.items()}),
        "warned": int(account.warned),
        "exceeded_at": account.exceeded_at,
        "exceeded_by": account.exceeded_by,
    }


def from_account_row(row: Row) -> Account:
    return Account(
        id=row["id"],
        workspace=row["workspace"],
        budget=Budget(**json.loads(row["budget"])),
        closed=Amounts(**json.loads(row["closed"])),
        offsets={name: Amounts(**amounts) for name, amounts in json.loads(row["offsets"]).items()},
        warned=bool(row["warned"]),
        exceeded_at=row["exceeded_at"],
        exceeded_by=row["exceeded_by"],
    )
