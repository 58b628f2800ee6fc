#!/usr/bin/env python3
"""Pack the training script into a self-extracting file.

    python tools/pack_code.py -o packed.py
    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 packed.py

The challenge counts the bytes of the script that runs. Run the packed file instead of train_gpt.py
and submit it under that name; its size is the code size. Its logs begin with the readable source.

Comments and docstrings are removed first, except the module's docstring, and ast.unparse writes the
rest, one statement a line.
"""

import ast
import bz2
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import program
import train_gpt
from train_gpt import UserError, require

# The compressed source is one large number. Its digits, to base 251, are the Latin-1 characters
# that can stand in a string literal as they are. That costs 0.4 %, where escapes would cost 2 % and
# base85 25 %.
HEAD = b"# coding: latin-1\nimport bz2\nn=0\nfor c in '"
TAIL = (
    b"':c=ord(c);n=n*251+c-1-(c>10)-(c>13)-(c>39)-(c>92)\n"
    b"SOURCE=bz2.decompress(n.to_bytes(n.bit_length()+7>>3))\nexec(compile(SOURCE,__file__,'exec'))\n"
)
DIGITS = bytes(sorted(set(range(256)) - set(b"\0\n\r'\\")))
# No script is larger. The limits keep a damaged or malicious file from filling the memory, and from
# taking long: the time to convert the digits grows with the square of their number.
MAX_SOURCE_BYTES = 1 << 24
MAX_DIGITS = 1 << 17


def program_of(source: bytes) -> ast.Module:
    """Its syntax tree, without the docstrings of classes and functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            while ast.get_docstring(node) is not None:  # the next string would become one
                node.body = node.body[1:] or [ast.Pass()]
    return tree


@functools.cache
def dump_of(source: bytes) -> str:
    """The same as text, by which programs are compared."""
    return ast.dump(program_of(source))


@functools.cache
def without_comments(source: bytes) -> bytes:
    """The program of this source. Raises UserError if it cannot be written."""
    try:
        result = f"{ast.unparse(program_of(source))}\n".encode()
        same = dump_of(result) == dump_of(source)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"comments cannot be removed ({error}): correct the script") from error
    require(same, "without its comments the script would be another program: report this")
    return result


def literal(blob: bytes) -> bytes:
    """The digits of the number that `blob` is. Its first byte must not be 0."""
    number, digits = int.from_bytes(blob, "big"), bytearray()
    while number:
        number, digit = divmod(number, len(DIGITS))
        digits.append(DIGITS[digit])
    require(len(digits) <= MAX_DIGITS, f"the compressed script exceeds {MAX_DIGITS} bytes")
    return bytes(reversed(digits))


def from_literal(digits: bytes) -> bytes:
    """The inverse of `literal`. Raises ValueError for other characters, or too many."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"more than {MAX_DIGITS} bytes")
    number = 0
    for digit in digits:
        number = number * len(DIGITS) + DIGITS.index(digit)
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def pack(source: bytes) -> bytes:
    """A program that sets `SOURCE` to `source` and executes it. bz2 takes 4 % less than LZMA."""
    return HEAD + literal(bz2.compress(source)) + TAIL


def readable_source(blob: bytes) -> bytes:
    """The readable source of a script, packed or not. Raises ValueError if it is damaged."""
    if not blob.startswith(HEAD):
        return blob
    if not blob.endswith(TAIL):
        raise ValueError("the packed script is incomplete")
    stream = bz2.BZ2Decompressor()
    try:
        source = stream.decompress(from_literal(blob[len(HEAD) : -len(TAIL)]), MAX_SOURCE_BYTES)
    except (ValueError, OSError) as error:
        raise ValueError(f"the packed script cannot be decompressed ({error})") from error
    if not stream.eof:
        larger = f"its source exceeds {MAX_SOURCE_BYTES} bytes"
        raise ValueError(f"the packed script is incomplete, or {larger}")
    return source


def is_current(source: bytes | None) -> bool:
    """Whether `source` is of the program of train_gpt.py, whatever its comments."""
    current = readable_source((ROOT / "train_gpt.py").read_bytes())
    try:  # not the bytes: another version of Python writes the same program otherwise
        return source is not None and dump_of(source) == dump_of(current)
    except (SyntaxError, ValueError):
        return False


def main() -> None:
    parser = program.parser(__doc__)
    add, usual = parser.add_argument, "train_gpt.packed.py"
    add("script", nargs="?", type=Path, default=ROOT / "train_gpt.py", help="default: train_gpt.py")
    add("-o", "--output", type=program.output_file, default=usual, help=f"default: {usual}")
    text = "fail if it is not today's train_gpt.py; write nothing"
    add("--check", action="store_true", help=text)
    arguments = parser.parse_args()
    try:
        code = arguments.script.read_bytes()
        source = readable_source(code)
        if arguments.check:
            again = "run `python tools/pack_code.py -o packed.py`"
            return require(is_current(source), f"it is not today's train_gpt.py: {again}")
        packed = pack(without_comments(source))
    except OSError as error:
        raise UserError(f"cannot read {arguments.script}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{arguments.script}: {error}") from error
    with train_gpt.replacing(arguments.output) as partial:
        partial.write_bytes(packed)
    print(f"{arguments.output}: {len(packed):,} bytes, packed from {len(code):,}")


if __name__ == "__main__":
    program.run_program(main)
