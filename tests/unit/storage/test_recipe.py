"""A recipe is checked in full, and every error says which key is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.core.code import BRIDGE, CODE_PORT
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
    assert recipe.warm == (("python3", "-c", "pass"),)


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


FURNISHED = """
name = "x"
packages = ["python3"]
memory_mb = 1024
min_memory_mb = 512
warm = [["true"], ["echo", "a b"]]
[python]
requirements = "x/requirements.txt"
[[files]]
from = "x/program"
to = "/opt/program"
mode = "0755"
[service]
argv = ["/opt/program", "-v", "-v"]
port = 99
"""
LOCKED = "numpy==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n# a remark\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/requirements.txt").write_text(LOCKED)
    (tmp_path / "x/program").write_text("#!/bin/sh\n")
    (tmp_path / "x.toml").write_text(FURNISHED)
    return tmp_path


def test_what_a_template_has_of_its_own(folder: Path) -> None:
    recipe = load_recipe(folder / "x.toml")
    assert recipe.python == LOCKED
    assert [(f.place, f.mode, f.content) for f in recipe.files] == [("/opt/program", 0o755, b"#!/bin/sh\n")]
    assert recipe.service is not None
    assert (recipe.service.argv, recipe.service.port) == (("/opt/program", "-v", "-v"), 99)
    assert recipe.warm == (("true",), ("echo", "a b"))
    assert (recipe.memory_mb, recipe.min_memory_mb) == (1024, 512)


def test_the_packages_of_another_recipe(folder: Path) -> None:
    (folder / "below.toml").write_text('name = "below"\npackages = ["git", "jq"]')
    (folder / "y.toml").write_text('name = "y"\npackages_of = "below"\npackages = ["tree", "git"]')
    recipe = load_recipe(folder / "y.toml")
    assert recipe.packages == ("git", "jq", "tree")
    assert recipe.below is not None
    assert (recipe.below.name, recipe.below.packages) == ("below", ("git", "jq"))
    (folder / "below.toml").write_text('name = "below"\npackages = ["git"]')
    assert load_recipe(folder / "y.toml").digest != recipe.digest


@pytest.mark.parametrize(
    ("below", "problem"),
    [
        ("z", "'z', which is not beside"),
        ("x", "may name only one that has `packages`"),
        ("y", "may name only one that has `packages`"),
        ("broken", "broken.toml: the file cannot be read"),
        ("../x", "`packages_of` may not be"),
    ],
)
def test_only_packages_are_taken_over(folder: Path, below: str, problem: str) -> None:
    (folder / "broken.toml").write_text("packages = ")
    (folder / "y.toml").write_text(f'name = "y"\npackages_of = "{below}"')
    with pytest.raises(ClocheError) as refused:
        load_recipe(folder / "y.toml")
    assert problem in refused.value.message


def test_every_byte_of_what_is_put_in_counts(folder: Path) -> None:
    before = load_recipe(folder / "x.toml").digest
    (folder / "x/program").write_text("#!/bin/sh\n#\n")
    after = load_recipe(folder / "x.toml").digest
    (folder / "x/requirements.txt").write_text(LOCKED.replace("1.0", "1.1"))
    assert len({before, after, load_recipe(folder / "x.toml").digest}) == 3


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"x/program"', '"../secret"', "path below the folder"),
        ('"x/program"', '"/etc/passwd"', "path below the folder"),
        ('"x/program"', '"x/link"', "leads out of the folder"),
        ('"x/program"', '"x/absent"', "is not there"),
        ('"/opt/program"\nmode', '"/opt/../etc/x"\nmode', "`files[0].to` may not be"),
        ('"0755"', '"4755"', "`files[0].mode` may not be"),
        ("port = 99", "port = 0", "`service.port` must be between"),
        ("port = 99", "", "`service.port` is missing"),
        ('argv = ["/opt/program", "-v", "-v"]', "argv = []", "`service.argv` is missing"),
        ('[["true"]', '["true"', "`warm` must hold commands"),
        ('["python3"]', "[]", "`python` needs the package python3"),
        ("min_memory_mb = 512", "min_memory_mb = 2048", "`memory_mb` must be at least"),
        ("x/requirements.txt", "x/absent.txt", "cannot be read"),
    ],
)
def test_what_it_has_is_checked(folder: Path, old: str, new: str, problem: str) -> None:
    (folder / "x/link").symlink_to("/etc/passwd")
    assert old in FURNISHED
    (folder / "x.toml").write_text(FURNISHED.replace(old, new))
    with pytest.raises(ClocheError) as refused:
        load_recipe(folder / "x.toml")
    assert problem in refused.value.message


@pytest.mark.parametrize(
    "line",
    ["numpy", "numpy==1.0", "numpy>=1 --hash=sha256:" + "0" * 64, "-r other.txt", "--index-url x", "a @ file:///x",
     "numpy==1.0 --hash=sha256:" + "0" * 64 + " --global-option=x"],
)  # fmt: skip
def test_only_locked_packages(folder: Path, line: str) -> None:
    (folder / "x/requirements.txt").write_text(LOCKED + line + "\n")
    with pytest.raises(ClocheError) as refused:
        load_recipe(folder / "x.toml")
    assert "requirements" in refused.value.message


def test_the_recipe_of_the_code_interpreter() -> None:
    recipe = load_recipe(ROOT / "templates/code-interpreter.toml")
    assert recipe.service is not None
    assert recipe.service.port == CODE_PORT
    assert recipe.service.argv == (BRIDGE,)
    assert BRIDGE in {file.place for file in recipe.files}
    assert "ipykernel==" in recipe.python
    assert recipe.aliases == ()


def test_the_one_with_r_is_the_same_and_r() -> None:
    plain = load_recipe(ROOT / "templates/code-interpreter.toml")
    with_r = load_recipe(ROOT / "templates/code-interpreter-r.toml")
    assert set(with_r.packages) - set(plain.packages) == {"r-base-core", "r-cran-irkernel"}
    assert (with_r.files, with_r.python, with_r.service, with_r.memory_mb, with_r.warm) == (
        plain.files, plain.python, plain.service, plain.memory_mb, plain.warm,
    )  # fmt: skip
