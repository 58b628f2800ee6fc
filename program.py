"""How the programs of tools/, data/ and bench/ end, and the files of variables that they read. They
import it before all other modules, so that Ctrl-C while those are imported is one sentence, too."""

import os
import sys
from collections.abc import Callable
from pathlib import Path


def interrupted(kind: type, *error: object) -> None:
    """sys.excepthook: Ctrl-C outside `run_program`."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *error)
        return
    print("error: interrupted by Ctrl-C", file=sys.stderr)
    sys.exit(130)


sys.excepthook = interrupted

from train_gpt import KNOBS, UserError, error_message, importing, print_error, require  # noqa: E402


def read_env(path: str | Path) -> dict[str, str]:
    """The variables of a file like records/published.env. Raises UserError for a word that sets no
    knob."""
    known, found = {knob.name.upper() for knob in KNOBS}, {}
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for word in " ".join(line for line in lines if not line.startswith("#")).split():
        name, _, found[name] = word.partition("=")
        require(name in known, f"{path}: {word[:40]!r} sets no knob of train_gpt.py")
    return found


def run_program(main: Callable[[], object]) -> None:
    """Call a program's `main`. A user's mistake, a missing package, Ctrl-C or a full disk behind
    standard output is one sentence; if nobody reads that output, as in `| head`, there is none."""
    try:
        try:
            with importing("requirements-dev.txt"):
                main()
        except UserError as error:
            print_error(str(error))
            sys.exit(1)
        finally:
            print(end="", flush=True)  # an error at the interpreter's exit would be a traceback
    except OSError as error:
        if not error.filename:  # what is left of the output goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        place = error.filename or "standard output or a file"
        print_error(f"cannot use {place}: {error_message(error)}; check the path and the disk")
        sys.exit(1)
