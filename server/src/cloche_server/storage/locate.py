"""Where the agent and the recipes are: configured, beside the checkout, or installed."""

from __future__ import annotations

from pathlib import Path

from cloche_server.core.errors import ClocheError
from cloche_server.storage.recipe import NAME

#: `server/src/cloche_server/storage/locate.py` in a checkout.
_CHECKOUT = Path(__file__).resolve().parents[4]
_INSTALLED = Path("/usr/lib/cloche")


def find_agent(configured: Path | None) -> Path:
    """The guest agent binary. Raises `template.bake_failed` when there is none."""
    places = [configured] if configured else [_CHECKOUT / "agent" / "bin" / "cloche-agent", _INSTALLED / "cloche-agent"]
    for place in places:
        if place.is_file():
            return place
    raise ClocheError(
        "template.bake_failed",
        f"the guest agent is not at {' or '.join(map(str, places))}; run ./quickstart, or set CLOCHE_AGENT",
    )


def find_recipe(configured: Path | None, name: str) -> Path:
    """The recipe file of a template name. Raises `template.not_found`."""
    folders = [configured] if configured else [_CHECKOUT / "templates", _INSTALLED / "templates"]
    for folder in folders:
        path = folder / f"{name}.toml"
        # What cannot be the name of a recipe is not looked for: it may be no name of a file either.
        if NAME.fullmatch(name) is not None and path.is_file():
            return path
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})
    raise ClocheError("template.not_found", f"there is no recipe {name}; there are: {', '.join(known) or 'none'}")


def not_baked(configured: Path | None, name: str) -> ClocheError:
    """The `template.not_found` for a name that nothing was baked under, with what to do when there is a recipe."""
    try:
        find_recipe(configured, name)
    except ClocheError:
        told = f"template {name} not found; `GET /v1/templates` lists what there is"
    else:
        told = (
            f"template {name} has not been baked on this server yet; "
            f"its operator can do that with `cloche-server template bake {name}`"
        )
    return ClocheError("template.not_found", told, details={"template": name})
