#!/usr/bin/env python3
"""Fetch the challenge's published shards and tokenizer from the Hugging Face hub.

    python data/download_fineweb.py                     # sp1024: 80 training shards (16 GB), all of validation
    python data/download_fineweb.py --train-shards 1    # enough for a try

The hub's client does the transfer (it resumes what was interrupted and fetches nothing twice); the files are then
linked into data/datasets/fineweb10B_<variant>/ and data/tokenizers/, where train_gpt.py looks for them.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt

REPOSITORY = os.environ.get("FINEWEB_REPOSITORY", "willdepueoai/parameter-golf")
FOLDER = os.environ.get("FINEWEB_FOLDER", "datasets")  # of the repository


def patterns(variant: str, train_shards: int) -> list[str]:
    """What to fetch: so many training shards, validation and tokenizers whole."""
    dataset = f"{FOLDER}/datasets/fineweb10B_{variant}"
    shards = [f"{dataset}/fineweb_train_{number:06d}.bin" for number in range(train_shards)]
    return [*shards, f"{dataset}/fineweb_val_*.bin", f"{FOLDER}/tokenizers/*"]


def place(snapshot: Path, variant: str, target: Path) -> tuple[int, int]:
    """Link (or else copy) a fetched snapshot into `target`. Returns the numbers of training and validation shards.

    Raises UserError if the snapshot has no shards of this variant, or one that is not whole.
    """
    source, dataset = snapshot / FOLDER, target / "datasets" / f"fineweb10B_{variant}"
    counts = []
    for split in ("train", "val"):
        shards = sorted((source / "datasets" / dataset.name).glob(f"fineweb_{split}_*.bin"))
        if not shards:
            raise train_gpt.UserError(f"{REPOSITORY} has no {split} shards of {dataset.name}: "
                                      "see --variant, FINEWEB_REPOSITORY and FINEWEB_FOLDER")
        for shard in shards:
            train_gpt.read_shard(shard)
            link(shard, dataset / shard.name)
        counts.append(len(shards))
    for tokenizer in sorted((source / "tokenizers").glob("*")):
        link(tokenizer, target / "tokenizers" / tokenizer.name)
    return counts[0], counts[1]


def link(source: Path, target: Path) -> None:
    """A hard link to what `source` really is, or a copy where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)
    partial.unlink(missing_ok=True)  # renaming a link onto its twin leaves both


def fetch(variant: str, train_shards: int) -> Path:
    """Fetch everything. Returns the folder that mirrors the repository. Raises UserError if that fails."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise train_gpt.UserError("huggingface_hub is not installed: pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(REPOSITORY, repo_type="dataset", allow_patterns=patterns(variant, train_shards)))
    except Exception as error:  # the client raises its own, requests' and the operating system's exceptions
        reason = str(error).strip().splitlines()[0][:200]
        raise train_gpt.UserError(f"could not fetch {REPOSITORY}: {type(error).__name__}: {reason}; "
                                  "check the network and start again") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="sp1024", help="sp1024, sp2048, sp4096, sp8192 or byte260")
    parser.add_argument("--train-shards", type=int, default=80, help="100 million tokens each")
    arguments = parser.parse_args()
    try:
        train, val = place(fetch(arguments.variant, arguments.train_shards), arguments.variant, ROOT / "data")
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")
    print(f"in place: {train} training and {val} validation shards in data/datasets/fineweb10B_{arguments.variant}")


if __name__ == "__main__":
    main()
