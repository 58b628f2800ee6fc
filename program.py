"""How the programs of tools/, data/ and bench/ end, and the files of variables that they read."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from train_gpt import KNOBS, UserError, error_message, importing, require


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
    """Call a program's `main`. A user's mistake, a missing package or Ctrl-C is one sentence."""
    try:
        with importing("requirements-dev.txt"):
            main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(
            f"error: cannot use {error.filename or 'a file'}: {error_message(error)}; check the path"
        )
