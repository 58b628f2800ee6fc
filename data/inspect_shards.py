#!/usr/bin/env python3
"""Inspect a folder of shards: its contents, its integrity, and documents shared by training and
validation.

    python data/inspect_shards.py data/datasets/fineweb10B_sp1024 --tokenizer data/tokenizers/fineweb_1024_bpe.model

The exit status is non-zero if anything is wrong.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import caseops
import shards
import train_gpt
from train_gpt import BOS, UserError

# isort: split
import numpy as np


class SplitReport:
    """The contents of one split, file by file."""

    def __init__(self, folder: Path, split: str):
        self.split = split
        self.stream = train_gpt.TokenStream(str(folder), split, 65536)
        self.shards = [train_gpt.read_shard(path) for path in self.stream.paths]
        self.hashes = np.fromiter(map(document_hash, self.documents()), dtype=np.uint64)

    def documents(self) -> Iterator[np.ndarray]:
        """Tokens of each document without its BOS, across shards, also before the first BOS."""
        rest = np.empty(0, dtype=np.uint16)
        for number, shard in enumerate(self.shards):
            first, *parts = np.split(shard, np.flatnonzero(shard == BOS))
            rest = np.concatenate((rest, first))
            for part in parts:
                if number or len(rest):
                    yield rest
                rest, number = part[1:], 1
        yield rest


def document_hash(tokens: np.ndarray) -> int:
    """A 64-bit hash. 10 million documents collide with a probability of 3 in a million."""
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest())


def inspect(folder: Path, tokenizer: Path | None, samples: int = 3) -> list[str]:
    """Print the report. Returns sentences on what is wrong. Raises UserError."""
    manifest = shards.read_manifest(folder) or {"files": {}}
    reports = train, val = [SplitReport(folder, split) for split in ("train", "val")]
    wrong = shards.problems(folder, manifest)
    for report in reports:
        describe_files(report, wrong, manifest)
    entry = manifest.get("tokenizer", {})
    if tokenizer is None and entry and (folder / entry["path"]).is_file():
        tokenizer = folder / entry["path"]
    coder = None
    if tokenizer:
        size = shards.load_tokenizer(tokenizer).vocab_size()
        coder = caseops.Tokenizer(str(tokenizer), size)
        for report in reports:
            wrong += unknown_tokens(report, size)
        try:
            train_gpt.check_manifest(folder, tokenizer)
            if not wrong:
                tokens = val.stream.read(0, min(len(val.stream), 20_000))
                train_gpt.require_own_tokenizer(folder, tokenizer, tokens, print)
        except UserError as error:
            wrong.append(str(error))
        if coder.caseops and not entry.get("caseops"):
            other = "the tokenizer has CaseOps operators of another grammar (README.md)"
            print(f"{other}: no bytes and samples")
            coder = None
    else:
        print("no tokenizer (--tokenizer): no bytes and samples")
    exact = train_gpt.read_sidecar(folder, len(val.stream))
    if exact is not None:
        count = exact[1:].sum(dtype=np.int64)
        print(f"val: {count:,} bytes by fineweb_val_bytes_*.bin, which the score uses")
    for report in reports:
        print(describe(report, coder.counter if coder and not wrong else None))
        if report.shards[0][0] != BOS:
            first = f"{report.stream.paths[0]} does not begin with BOS (token {BOS})"
            wrong.append(f"{first}: the start of its first document is missing")
    both = int(np.isin(train.hashes, val.hashes).sum())
    print(f"documents of train that are also in val: {both:,}")
    if both:
        found = f"{folder} has {both} training documents that are also in validation"
        wrong.append(f"{found}: split the data again")
    if coder and not wrong:
        show_samples(val, coder, samples)
    return wrong


def describe_files(report: SplitReport, wrong: list[str], manifest: dict) -> None:
    """Print a line on each file of a split."""
    for path, shard in zip(report.stream.paths, report.shards, strict=True):
        status = "sha256 right" if manifest["files"] else "no sha256 to compare"
        if any(str(path) in sentence for sentence in wrong):
            status = "WRONG"
        starts = np.count_nonzero(shard == BOS)
        counts = f"{len(shard):,} tokens, largest {shard.max()}, {starts:,} documents begin here"
        print(f"{path.name}: {counts}, {status}")


def unknown_tokens(report: SplitReport, vocab_size: int) -> list[str]:
    """Sentences on the files that have tokens without a piece."""
    few = f"but the tokenizer has {vocab_size} pieces"
    largest = zip(report.stream.paths, map(np.max, report.shards), strict=True)
    return [f"{path} holds token {n}, {few}" for path, n in largest if n >= vocab_size]


def describe(report: SplitReport, counter: caseops.ByteCounter | None) -> str:
    """A line on a split; bytes need a counter."""
    tokens, documents = len(report.stream), len(report.hashes)
    counts = f"{len(report.shards)} files, {tokens:,} tokens, {documents:,} documents"
    line = f"{report.split}: {counts} ({tokens / documents:.1f} tokens each)"
    if counter:
        nbytes, last = 0, BOS  # token of the previous shard
        for shard in report.shards:
            nbytes += int(counter.count(np.insert(shard, 0, last)).sum())
            last = int(shard[-1])
        line += f", {nbytes:,} bytes ({nbytes / tokens:.3f} per token)"
    repeated = documents - len(np.unique(report.hashes))
    return f"{line}, {repeated:,} documents repeated"


def show_samples(report: SplitReport, coder: caseops.Tokenizer, samples: int) -> None:
    """Print the beginnings of documents that are spread over the split."""
    chosen = set(np.linspace(0, len(report.hashes) - 1, samples, dtype=int).tolist())
    for number, tokens in enumerate(report.documents()):
        if number in chosen:
            title = f"{report.split} document {number + 1} ({len(tokens):,} tokens)"
            print(f"{title}: {coder.decode(tokens[:80].tolist())!r}")


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("folder", type=Path)
    text = "SentencePiece model of the shards (default: the manifest's)"
    parser.add_argument("--tokenizer", type=Path, help=text)
    arguments = parser.parse_args()
    wrong = inspect(arguments.folder, arguments.tokenizer)
    if wrong:
        sys.exit("\n".join(f"error: {sentence}" for sentence in wrong))


if __name__ == "__main__":
    program.run_program(main)
