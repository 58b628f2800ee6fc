#!/usr/bin/env python3
"""The challenge's download command, for the lines that people paste: download_fineweb.py does the
work, and `--help` is its own.

    python data/cached_challenge_fineweb.py --variant sp1024 --train-shards 10
    python data/cached_challenge_fineweb.py 10 --variant sp8192
"""

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import download_fineweb

if __name__ == "__main__":
    program.run_program(download_fineweb.main)
