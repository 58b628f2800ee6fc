"""How the programs of tools/, data/ and bench/ end."""

import os
import sys
from collections.abc import Callable

from train_gpt import UserError, error_message, importing


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
