#!/usr/bin/env python3
"""Look into a folder of shards: what it holds, whether it is whole, and whether validation text was trained on.

    python data/inspect_shards.py data/datasets/fineweb10B_sp1024 --tokenizer data/tokenizers/fineweb_1024_bpe.model

Prints for every file its tokens, largest token and documents, and whether its sha256 is the one in manifest.json; for
each split documents, bytes, repeated documents; some decoded samples; documents that stand on both sides. Ends with
a non-zero status if anything is wrong.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent))

import shards
import train_gpt
from train_gpt import BOS, UserError


class SplitReport:
    """What was found in one split, file by file."""

    def __init__(self, folder: Path, split: str):
        self.split, self.stream = split, train_gpt.TokenStream(str(folder), split, 65536)
        self.largest = [int(shard.max()) for shard in self.stream.shards]
        self.starts = [int(np.count_nonzero(shard == BOS)) for shard in self.stream.shards]
        self.hashes = np.fromiter(map(document_hash, self.documents()), dtype=np.uint64)

    def documents(self) -> Iterator[np.ndarray]:
        """Each document's tokens without its BOS; one may go on in the next shard. What precedes the first BOS is one, too."""
        rest = np.empty(0, dtype=np.uint16)
        for number, shard in enumerate(self.stream.shards):
            first, *parts = np.split(shard, np.flatnonzero(shard == BOS))
            rest = np.concatenate((rest, first))
            for part in parts:
                if number or len(rest):
                    yield rest
                rest, number = part[1:], 1
        yield rest

    def repeated(self) -> int:
        """Documents that are in the split once more."""
        return len(self.hashes) - len(np.unique(self.hashes))


def document_hash(tokens: np.ndarray) -> int:
    """64 bits by which a document is known: among 10 million, two unequal ones share them with a chance of 3 in a million."""
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest())


def status_of(files: list[Path], folder: Path, manifest: dict | None) -> tuple[dict[str, str], list[str]]:
    """For each file a word on its sha256, and what is wrong, in sentences."""
    if manifest is None:
        return {path.name: "no manifest" for path in files}, []
    names = {path.name for path in files}
    wrong = [
        f"{folder / name} is in {shards.MANIFEST} but not there" for name in sorted(set(manifest["files"]) - names)
    ]
    status = {}
    for name in sorted(names):
        if name not in manifest["files"]:
            wrong.append(f"{folder / name} is not in {shards.MANIFEST}: it is read, too, but belongs to other data")
            status[name] = "not in the manifest"
            continue
        found = shards.problems(folder, manifest, [name])
        status[name], wrong = "WRONG" if found else "sha256 right", wrong + found
    return status, wrong


def find_tokenizer(given: Path | None, folder: Path, manifest: dict | None) -> Path | None:
    """The tokenizer to use: the given one or the manifest's."""
    if given is None and manifest is not None:
        given = folder / manifest["tokenizer"]["path"]
        return given if given.is_file() else None
    return given


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Raises UserError if there is no SentencePiece model at `path`."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a SentencePiece model: {str(error).strip().splitlines()[0]}") from error


def inspect(folder: Path, tokenizer: Path | None, samples: int) -> list[str]:
    """Print everything. Returns what is wrong, in sentences. Raises UserError where nothing can be read."""
    manifest = shards.read_manifest(folder)
    reports = [SplitReport(folder, split) for split in ("train", "val")]
    status, wrong = status_of([path for report in reports for path in report.stream.paths], folder, manifest)
    tokenizer = find_tokenizer(tokenizer, folder, manifest)
    pieces = counter = None
    if tokenizer:
        pieces = load_tokenizer(tokenizer)
        counter = train_gpt.ByteCounter(str(tokenizer), pieces.vocab_size())
        if manifest is not None and shards.file_sha256(tokenizer) != manifest["tokenizer"]["sha256"]:
            wrong.append(f"{tokenizer} is not the tokenizer that made the shards, by its sha256 in {shards.MANIFEST}")
    for report in reports:
        for path, shard, largest, starts in zip(
            report.stream.paths, report.stream.shards, report.largest, report.starts, strict=True
        ):
            print(
                f"{path.name}: {len(shard):,} tokens, largest {largest}, {starts:,} documents begin here, {status[path.name]}"
            )
            if pieces and largest >= pieces.vocab_size():
                wrong.append(f"{path} holds token {largest}, but the tokenizer has {pieces.vocab_size()} pieces")
    for report in reports:
        print(describe(report, None if wrong else counter))
        if report.stream.shards[0][0] != BOS:
            wrong.append(
                f"{report.stream.paths[0]} does not begin with BOS (token {BOS}): the first document's start is missing"
            )
    both = int(np.isin(reports[0].hashes, reports[1].hashes).sum())
    print(f"documents of train that are also in val: {both:,}")
    if both:
        wrong.append(
            f"{folder} has {both} training documents that are also in validation: a score on it says nothing, split it again"
        )
    if pieces and not wrong:
        show_samples(reports[1], pieces, samples)
    elif not pieces:
        print("no tokenizer: bytes and samples are left out (--tokenizer)")
    return wrong


def describe(report: SplitReport, counter: train_gpt.ByteCounter | None) -> str:
    """One line on a split."""
    tokens, documents = len(report.stream), len(report.hashes)
    line = f"{report.split}: {len(report.stream.shards)} files, {tokens:,} tokens, {documents:,} documents ({tokens / documents:.1f} each)"
    if counter:
        before = [BOS, *(int(shard[-1]) for shard in report.stream.shards)]  # the last token of the shard before
        nbytes = sum(
            int(counter.count(np.insert(shard, 0, last)).sum())
            for last, shard in zip(before, report.stream.shards, strict=False)
        )
        line += f", {nbytes:,} bytes ({nbytes / tokens:.3f} a token)"
    return f"{line}, {report.repeated():,} documents repeated"


def show_samples(report: SplitReport, pieces: sentencepiece.SentencePieceProcessor, samples: int) -> None:
    """The beginnings of some documents, from all over the split."""
    chosen = set(np.linspace(0, len(report.hashes) - 1, samples, dtype=int).tolist())
    for number, tokens in enumerate(report.documents()):
        if number in chosen:
            print(
                f"{report.split} document {number + 1} ({len(tokens):,} tokens): {pieces.decode(tokens[:80].tolist())!r}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="SentencePiece model of the shards (default: the manifest's)")
    parser.add_argument(
        "--samples", type=int, default=3, help="documents of validation to show the beginnings of (default: 3)"
    )
    arguments = parser.parse_args()
    try:
        wrong = inspect(arguments.folder, arguments.tokenizer, arguments.samples)
    except UserError as error:
        sys.exit(f"error: {error}")
    if wrong:
        sys.exit("\n".join(f"error: {sentence}" for sentence in wrong))


if __name__ == "__main__":
    main()
