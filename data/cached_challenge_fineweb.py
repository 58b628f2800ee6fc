#!/usr/bin/env python3
"""The challenge's download command, for the lines that people paste:

    python data/cached_challenge_fineweb.py --variant sp1024 --train-shards 10
    python data/cached_challenge_fineweb.py 10 --variant sp8192

It takes the challenge's arguments and hands them to download_fineweb.py, which verifies every file.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import download_fineweb


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", nargs="?", type=int, help="the same as --train-shards")
    parser.add_argument("--train-shards", type=int, default=80)
    parser.add_argument("--variant", default="sp1024")
    parser.add_argument("--with-docs", action="store_true")
    parser.add_argument(
        "--skip-manifest",
        action="store_true",
        help="has no effect: the hub's manifest is small, and an old one could be wrong",
    )
    parser.add_argument("--target", default=str(download_fineweb.TARGET))
    arguments = parser.parse_args()
    count = arguments.train_shards if arguments.count is None else arguments.count
    words = ["--variant", arguments.variant, "--train-shards", str(count)]
    words += ["--with-docs"] * arguments.with_docs + ["--target", arguments.target]
    sys.argv[1:] = words
    download_fineweb.main()


if __name__ == "__main__":
    program.run_program(main)
