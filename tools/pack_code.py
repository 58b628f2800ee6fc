#!/usr/bin/env python3
"""Pack the training script into a self-extracting file.

    python tools/pack_code.py -o packed.py
    torchrun --standalone --nproc_per_node=8 packed.py

The challenge counts the bytes of the script that runs. Run the packed file instead of train_gpt.py and submit it under
that name; its size is the code size. It holds the compressed source, sets the global `SOURCE` to the readable source
(bytes) and executes it. The script logs `SOURCE`, so a log always begins with the readable source.
"""

import argparse
import ast
import bz2
import lzma
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt
from train_gpt import UserError

HEAD = "# coding: latin-1\nimport {module};SOURCE={module}.decompress('"
TAIL = "'.encode('latin-1'))\nexec(compile(SOURCE,__file__,'exec'))\n"
LZMA_FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
COMPRESS = {
    "bz2": lambda source: bz2.compress(source, 9),
    "lzma": lambda source: lzma.compress(source, lzma.FORMAT_ALONE, filters=LZMA_FILTERS),
}
DECOMPRESSOR = {"bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor}
MAX_SOURCE_BYTES = 1 << 24  # no script is larger; keeps a damaged or malicious file from filling the memory


def literal(blob: bytes) -> bytes:
    """The inside of a Python string in single quotes whose characters are the bytes of `blob` in Latin-1."""
    # Costs 2 %, where base85 would cost 25 %. Only what would end the line or the string is escaped; a NUL before an
    # octal digit takes the long form.
    for plain, escaped in ((b"\\", b"\\\\"), (b"'", b"\\'"), (b"\n", b"\\n"), (b"\r", b"\\r")):
        blob = blob.replace(plain, escaped)
    return re.sub(rb"\0(?=[0-7])", rb"\\000", blob).replace(b"\0", b"\\0")


def pack(source: bytes) -> bytes:
    """A program that sets `SOURCE` to `source` and executes it. Returns the smaller of the bz2 and the lzma form."""
    packed = [
        HEAD.format(module=module).encode() + literal(compress(source)) + TAIL.encode()
        for module, compress in COMPRESS.items()
    ]
    return min(packed, key=len)


def readable_source(blob: bytes) -> bytes:
    """The readable source of a script, packed or not. Nothing is executed. Raises ValueError if a packed script is
    damaged."""
    for module, decompressor in DECOMPRESSOR.items():
        head = HEAD.format(module=module).encode()
        if not blob.startswith(head):
            continue
        if not blob.endswith(TAIL.encode()):
            raise ValueError("the packed script is incomplete")
        text = blob.removeprefix(head).removesuffix(TAIL.encode()).decode("latin-1")
        try:
            stream = decompressor()
            source = stream.decompress(ast.literal_eval(f"'{text}'").encode("latin-1"), MAX_SOURCE_BYTES)
        except (SyntaxError, ValueError, OSError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"the packed script cannot be decompressed ({error})") from error
        if not stream.eof:
            raise ValueError(f"the packed script is incomplete, or its source exceeds {MAX_SOURCE_BYTES} bytes")
        return source
    return blob


def script_source() -> bytes:
    """The readable source of this repository's train_gpt.py."""
    return readable_source((ROOT / "train_gpt.py").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, default=ROOT / "train_gpt.py", help="default: train_gpt.py")
    parser.add_argument("-o", "--output", type=Path, default=Path("train_gpt.packed.py"), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        source = readable_source(arguments.script.read_bytes())
    except OSError as error:
        sys.exit(f"error: cannot read {arguments.script}: {error.strerror}")
    except ValueError as error:
        sys.exit(f"error: {arguments.script}: {error}")
    packed = pack(source)
    try:
        with train_gpt.replacing(arguments.output) as partial:
            partial.write_bytes(packed)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.output}: {len(packed):,} bytes, packed from {len(source):,}")


if __name__ == "__main__":
    main()
