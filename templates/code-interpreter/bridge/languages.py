"""The languages that there are kernels for, and what kernels of other makers are told before and after a cell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LANGUAGES = {"python": "python", "bash": "bash", "javascript": "deno", "typescript": "deno", "r": "r"}
#: To code that asks, in a run without `input`.
NO_INPUT = (
    "the code asks for input, and nobody can answer: put the value into the code, or run it with `input` switched on"
)
#: `IRkernel::main()`, but what would ask where nobody can answer, and then wait for ever, is refused.
_R = f"""local({{
  kernel <- IRkernel:::Kernel$new(connection_file = commandArgs(TRUE)[[1]])
  executor <- kernel$executor
  for (name in c("readline", "get_pass")) local({{
    ask <- eval(call("$", executor, name))
    assign(name, function(prompt = "") {{
      if (!isTRUE(executor$current_request$content$allow_stdin)) stop({json.dumps(NO_INPUT)}, call. = FALSE)
      ask(prompt)
    }}, envir = as.environment(executor))
  }})
  kernel$run()
}})"""
ARGV = {
    "deno": ["deno", "jupyter", "--kernel", "--conn"],
    "r": ["R", "--no-save", "--no-restore", "--slave", "-e", _R, "--args"],
}
#: Where R's packages are: Debian's, and those that somebody has installed beside them.
_R_LIBRARIES = ("/usr/local/lib/R/site-library", "/usr/lib/R/site-library", "/usr/lib/R/library")


def languages() -> list[str]:
    """Those of which the kernels are there."""
    have = {
        "deno": shutil.which("deno") is not None,
        "r": shutil.which("R") is not None and any(Path(one, "IRkernel").is_dir() for one in _R_LIBRARIES),
    }
    return [name for name, kind in LANGUAGES.items() if have.get(kind, True)]


def surroundings(kind: str, env: dict[str, str], cwd: str | None) -> tuple[str, str]:
    """What a cell has before and after it, of a kernel that cannot be told beside code: the environment and directory
    of one run. Text of JSON is text of these languages too."""

    def quoted(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    if kind == "deno":
        go = f"Deno.chdir({quoted(cwd)});" if cwd else ""
        kept = 'globalThis[Symbol.for("cloche.before")]'
        before = (
            f"{{ const env = {quoted(env)}; {kept} = [Deno.cwd(), Object.keys(env).map((k) => [k, Deno.env.get(k)])];"
            f" for (const [k, v] of Object.entries(env)) Deno.env.set(k, v); {go} }}"
        )
        after = (
            f"{{ const [cwd, env] = {kept}; Deno.chdir(cwd); delete {kept};"
            " for (const [k, v] of env) v === undefined ? Deno.env.delete(k) : Deno.env.set(k, v); }"
        )
        return before, after
    names = f"c({', '.join(map(quoted, env))})" if env else "character()"
    lines = [f"options(cloche.before = list(wd = getwd(), env = Sys.getenv({names}, unset = NA, names = TRUE)))"]
    lines += [f"do.call(Sys.setenv, setNames(list({quoted(value)}), {quoted(name)}))" for name, value in env.items()]
    lines += [f"setwd({quoted(cwd)})"] if cwd else []
    after = (
        'local({ was <- getOption("cloche.before"); options(cloche.before = NULL); setwd(was$wd)\n'
        "for (n in names(was$env)) if (is.na(was$env[[n]])) Sys.unsetenv(n)"
        " else do.call(Sys.setenv, setNames(list(was$env[[n]]), n)) })"
    )
    return "\n".join(lines), after
