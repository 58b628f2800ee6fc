"""How the programs of tools/, data/ and bench/ end, and arguments and files that they share. They
import it before all other modules, so that Ctrl-C while those are imported is one sentence, too."""

import argparse
import io
import math
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
for name in ("stdin", "stdout", "stderr"):
    if getattr(sys, name) is None:  # closed, as by `<&-`; the next open file would get its number
        setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115

from train_gpt import (  # noqa: E402
    KNOBS,
    UserError,
    end,
    error_message,
    importing,
    require,
)


def read_env(path: str | Path) -> dict[str, str]:
    """The variables of a file like configs/399.env. Raises UserError for a word that sets no
    knob."""
    known, found = {knob.name.upper() for knob in KNOBS}, {}
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for word in " ".join(line for line in lines if not line.startswith("#")).split():
        name, _, found[name] = word.partition("=")
        require(
            name in known,
            f"{path}: {word[:40]!r} sets no knob of train_gpt.py: give a file like configs/399.env",
        )
    return found


def parser(manual: str) -> argparse.ArgumentParser:
    """One whose --help begins with this text as it is."""
    kept = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=manual, formatter_class=kept)


def utf8(text: str) -> str:
    """A text of the command line, which is UTF-8 whatever the locale, as the type of an argument."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"it is not UTF-8 ({error.reason}): convert it") from error


def positive(text: str, kind: type = float) -> float:
    """A number above 0, as the type of an argument."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        whole = "whole " * (kind is int)
        raise argparse.ArgumentTypeError(f"{text} is not a {whole}number above 0")
    return number


def count(text: str) -> int:
    return positive(text, int)


def output_file(text: str) -> Path:
    """The path of a file to write, as the type of an argument: refused before the work begins."""
    path, folder = Path(text), Path(text).parent
    for wrong, why in (
        (path.is_dir(), "is a folder: add the name of a file"),
        # A file that is moved there would replace a device, for all programs.
        (path.exists() and not path.is_file(), "is no regular file: choose another name"),
        (not folder.is_dir(), f"is in no folder: make {folder} first"),
        # Endings such as .partial are added, and most file systems take 255.
        (len(os.fsencode(path.name)) > 230, "is too long: choose a shorter name"),
        (not is_writable(folder), "is in a folder that is not writable: choose another folder"),
        (path.exists() and not is_writable(path), "is not writable: choose another name"),
    ):
        if wrong:
            raise argparse.ArgumentTypeError(f"{text} {why}")
    return path


def output_folder(text: str) -> Path:
    """The same for a folder, which need not exist."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not (there.is_dir() and is_writable(there)):
        raise argparse.ArgumentTypeError(
            f"{there} is not a writable folder: choose another one than {text}"
        )
    return Path(text)


def is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def cores() -> int:
    """The CPUs that this process may use."""
    linux = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1


def run_program(main: Callable[[], object]) -> None:
    """Call a program's `main`. A user's mistake, a missing package, Ctrl-C or a full disk behind
    standard output is one sentence; if nobody reads that output, as in `| head`, there is none."""
    # An accent where only ASCII is printed; a name that is not UTF-8
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is of another class
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            with importing("requirements-dev.txt"):
                main()
        except UserError as error:
            end(str(error))
        finally:
            print(end="", flush=True)  # an error at the interpreter's exit would be a traceback
    except OSError as error:
        if not error.filename:  # what is left of the output goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        place = error.filename or "standard output or a file"
        end(f"cannot use {place}: {error_message(error)}; check the path and the disk")
