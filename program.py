"""How the programs of tools/, data/ and bench/ end. They import it before all other modules, so
that Ctrl-C while those are imported is one sentence, too."""

import os
import sys
from collections.abc import Callable


def interrupted(kind: type, *error: object) -> None:
    """sys.excepthook: Ctrl-C outside `run_program`."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *error)
        return
    print("error: interrupted by Ctrl-C", file=sys.stderr)
    sys.exit(130)


sys.excepthook = interrupted

from train_gpt import UserError, error_message, importing  # noqa: E402


def run_program(main: Callable[[], object]) -> None:
    """Call a program's `main`. A user's mistake, a missing package, Ctrl-C or a full disk behind
    standard output is one sentence; if nobody reads that output, as in `| head`, there is none."""
    try:
        try:
            with importing("requirements-dev.txt"):
                main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        finally:
            print(end="", flush=True)  # an error at the interpreter's exit would be a traceback
    except OSError as error:
        if not error.filename:  # what is left of the output goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        place = error.filename or "standard output or a file"
        sys.exit(f"error: cannot use {place}: {error_message(error)}; check the path and the disk")
