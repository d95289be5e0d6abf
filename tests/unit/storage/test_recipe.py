"""A recipe is checked in full, and every error says which key is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.storage.recipe import Defaults, load_recipe, parse_recipe

ROOT = Path(__file__).parents[3]


def test_the_base_recipe() -> None:
    recipe = load_recipe(ROOT / "templates/base.toml")
    assert recipe.name == "base"
    assert recipe.aliases == ("ubuntu-24.04",)
    assert recipe.disk_mb == 4096
    assert {"python3", "git", "curl", "ca-certificates"} <= set(recipe.packages)
    assert recipe.defaults.env["LANG"] == "C.UTF-8"


def test_only_a_name_is_needed() -> None:
    recipe = parse_recipe('name = "x"')
    assert (recipe.packages, recipe.aliases, recipe.defaults) == ((), (), Defaults())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "`name` is missing"),
        ("name = 3", "`name` must be text"),
        ('name = "A B"', "`name` may not be"),
        ('name = "../x"', "`name` may not be"),
        ('name = "x', "not TOML"),
        ('name = "x"\nsize = 1', "`size` is not known"),
        ('name = "x"\naliases = "y"', "`aliases` must be a list"),
        ('name = "x"\naliases = ["x"]', "`aliases` repeats the name"),
        ('name = "x"\npackages = ["a b"]', "`packages` may not hold 'a b'"),
        ('name = "x"\npackages = ["-o"]', "`packages` may not hold"),
        ('name = "x"\npackages = [1]', "`packages` may not hold 1"),
        ('name = "x"\npackages = ["git", "git"]', "names something twice"),
        ('name = "x"\ndisk_mb = true', "`disk_mb` must be a whole number"),
        ('name = "x"\ndisk_mb = 10', "`disk_mb` must be between"),
        ('name = "x"\ndefaults = 1', "`defaults` must be a table"),
        ('name = "x"\n[defaults]\nshell = "x"', "`defaults.shell` is not known"),
        ('name = "x"\n[defaults]\nworkdir = "a"', "`defaults.workdir` must be an absolute path"),
        ('name = "x"\n[defaults]\nuser = "a:b"', "`defaults.user` may not be"),
        ('name = "x"\n[defaults.env]\nA = 1', "`defaults.env.A` must be text"),
        ('name = "x"\n[defaults.env]\n"A=B" = "1"', "`defaults.env.A=B` is not a name"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ClocheError) as caught:
        parse_recipe(text, "my.toml")
    assert caught.value.code == "template.invalid_recipe"
    assert caught.value.message.startswith("my.toml: ")
    assert problem in caught.value.message


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ClocheError) as caught:
        load_recipe(tmp_path / "none.toml")
    assert caught.value.code == "template.invalid_recipe"


def test_the_digest_follows_the_content_only() -> None:
    one = parse_recipe('name = "x"\npackages = ["git", "jq"]')
    assert parse_recipe('name = "y"\ndescription = "d"\npackages = ["jq", "git"]').digest == one.digest
    assert parse_recipe('name = "x"\npackages = ["git"]').digest != one.digest
