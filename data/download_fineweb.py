#!/usr/bin/env python3
"""Download the challenge's published shards and tokenizer from the Hugging Face hub.

    python data/download_fineweb.py                         # sp1024: 80 training shards (16 GB), all of validation
    python data/download_fineweb.py --train-shards 1        # enough for a first try
    python data/download_fineweb.py --check                 # verify the files; needs no network
    python data/download_fineweb.py --variant sp8192        # 8,192 pieces, from the repository that has them

The hub's client downloads into its cache. The files are then linked (copied if the cache is on
another file system) into data/datasets/fineweb10B_<variant>/ and data/tokenizers/, where
train_gpt.py looks for them. Files are verified with the hub's checksums before the download, so
correct ones are not downloaded again, and after it. data/README.md has the variants and variables.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import shards
import train_gpt
from train_gpt import UserError, require

CASEOPS = "sp8192_lossless_caps_caseops_v1_reserved"
# The repository of each variant: the challenge's own has 1,024 pieces only (its issues #899, #1189).
REPOSITORIES = {
    "sp1024": "willdepueoai/parameter-golf",
    "sp4096": "kevclark/parameter-golf",
    "sp8192": "kevclark/parameter-golf",
    CASEOPS: "romeerp/parameter-golf-caseops-v1",
}
DOCUMENTS = ("docs_selected.jsonl", "docs_selected.source_manifest.json")
TARGET = Path(__file__).resolve().parent


class Wanted(NamedTuple):
    """A file: its path in the repository, its place here, and the hub's size and checksum."""

    path: str
    local: Path
    size: int
    sha256: str = ""  # of large files
    git_sha1: str = ""  # of all files: SHA-1 of "blob <size>\0" and the content

    def is_there(self) -> bool:
        """Whether the local file has this size and checksum."""
        if not self.local.is_file() or self.local.stat().st_size != self.size:
            return False
        if self.sha256:
            return shards.file_sha256(self.local) == self.sha256
        blob = f"blob {self.size}\0".encode() + self.local.read_bytes()
        return hashlib.sha1(blob).hexdigest() == self.git_sha1


class Hub:
    """The hub's client for one repository and a folder of it. Its failures become UserErrors."""

    def __init__(self, variant: str):
        import huggingface_hub

        self.client = huggingface_hub
        usual = REPOSITORIES.get(variant, REPOSITORIES["sp1024"])
        self.repository = os.environ.get("MATCHED_FINEWEB_REPO_ID", usual)
        self.folder = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/")
        self.here = {"repo_id": self.repository, "repo_type": "dataset"}

    def failing(self):
        """A context in which the client's and the system's errors are one sentence."""
        return train_gpt.as_user_error(
            f"could not get {self.repository} from the hub",
            "check the network, the disk and MATCHED_FINEWEB_REPO_ID, then start again (if the hub "
            "limits your requests, later, or with HF_TOKEN); complete files are kept",
            Exception,
        )

    def tree(self) -> dict:
        """The hub's entry of each file, by its path. `fetch` keeps to its revision."""
        with self.failing():
            info = self.client.dataset_info(self.repository, files_metadata=True, timeout=20)
        self.here["revision"] = info.sha
        return {entry.rfilename: entry for entry in info.siblings}

    def fetch(self, paths: list[str], again: bool = False) -> list[Path]:
        """Download files into the client's cache, several at once. `again` replaces cached files."""
        from tqdm.contrib.concurrent import thread_map  # the client brings it

        def fetched(path: str) -> Path:
            get = self.client.hf_hub_download
            return Path(get(filename=path, force_download=again, **self.here))

        with self.failing():
            return thread_map(fetched, paths, max_workers=8, desc="files", disable=len(paths) < 2)


def dataset_name(variant: str) -> str:
    return f"fineweb10B_{variant}"


def tokenizer_names(manifest: dict, variant: str) -> list[str]:
    """The file names of the variant's tokenizer in the hub's manifest. Raises UserError."""
    with train_gpt.as_user_error(
        "manifest.json of the repository has an unknown format",
        "update this script",
        *(KeyError, TypeError, ValueError, AttributeError, StopIteration),
    ):
        datasets = {entry["name"]: entry for entry in manifest["datasets"]}
        wanted = datasets[dataset_name(variant)]["tokenizer_name"]
        entry = next(entry for entry in manifest["tokenizers"] if entry["name"] == wanted)
        paths = [entry[key] for key in ("model_path", "vocab_path", "path") if entry.get(key)]
        require(paths, "manifest.json names no file of the tokenizer: update this script")
        # A path in the manifest must not lead to another folder.
        return [PurePosixPath(path).name for path in paths]


def plan(hub: Hub, variant: str, train_shards: int, target: Path, documents: bool) -> list[Wanted]:
    """The variant's files: tokenizer, shards, perhaps the documents. Raises UserError."""
    tree, name = hub.tree(), f"datasets/{dataset_name(variant)}"
    (manifest,) = hub.fetch([f"{hub.folder}/manifest.json"])
    own = sorted(path.removeprefix(f"{hub.folder}/") for path in tree)
    own = [path for path in own if path.startswith(f"{name}/fineweb_")]
    advice = f"set --variant to one of {', '.join(REPOSITORIES)}"
    if REPOSITORIES.get(variant, hub.repository) != hub.repository:
        advice = f"set MATCHED_FINEWEB_REPO_ID={REPOSITORIES[variant]}, which has it"
    require(own, f"{hub.repository} has no variant {variant}: {advice}")
    train = [path for path in own if "_train_" in path]
    few = f"{hub.repository} has {len(train)} training shards of {variant}, not {train_shards}"
    require(train_shards <= len(train), f"{few}: lower --train-shards")
    tokenizers = tokenizer_names(json.loads(manifest.read_bytes()), variant)
    paths = [f"tokenizers/{tokenizer}" for tokenizer in tokenizers]
    paths += train[:train_shards] + [path for path in own if "_val_" in path]
    paths += DOCUMENTS * documents
    advice = "tell its owner, or name another repository by MATCHED_FINEWEB_REPO_ID"
    files = []
    for path in paths:
        entry = tree.get(f"{hub.folder}/{path}")
        require(entry, f"{hub.repository} lacks {hub.folder}/{path}: {advice}")
        sha256 = entry.lfs.sha256 if entry.lfs else ""
        files.append(Wanted(entry.rfilename, target / path, entry.size, sha256, entry.blob_id))
    return files


def check_space(files: list[Wanted], place: Path) -> None:
    """Raises UserError if the files do not fit on the disk of this folder."""
    size = sum(file.size for file in files)
    place = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    require(
        size <= free,
        f"the download has {size:,} bytes, but the disk of {place} has {free:,} left: free some "
        "space, lower --train-shards, or set HF_HOME to a folder on a larger disk",
    )


def not_there(files: Iterable[Wanted]) -> list[Wanted]:
    """The files that are missing or differ from the hub's. Shows a progress bar while it reads."""
    from tqdm import tqdm

    bar = tqdm(files, "verifying", unit="file", disable=None)
    return [file for file in bar if not file.is_there()]


def have(files: list[Wanted], hub: Hub) -> int:
    """Download and link what is missing or wrong. Returns the number of downloaded files."""
    missing = not_there(files)
    check_space(missing, Path(hub.client.constants.HF_HUB_CACHE))
    for folder in {file.local.parent for file in missing}:
        with train_gpt.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    fetched = len(missing)
    # A damaged link means a damaged file in the cache, so the second try replaces that
    for again in (False, True):
        cached = hub.fetch([file.path for file in missing], again) if missing else []
        for file, source in zip(missing, cached, strict=True):
            with train_gpt.replacing(file.local) as partial:
                try:
                    os.link(source.resolve(), partial)
                except OSError:  # another file system
                    shutil.copyfile(source, partial)
        missing = not_there(missing)
    wrong = ", ".join(str(file.local) for file in missing[:1])
    require(not missing, f"{wrong} has a wrong size or checksum after the download: start again")
    return fetched


def record(files: list[Wanted], folder: Path, hub: Hub) -> None:
    """Write the manifest of `folder`. Shards downloaded earlier stay in it."""
    before = (shards.read_manifest(folder) or {"files": {}})["files"]
    entries = {name: entry for name, entry in before.items() if (folder / name).is_file()}
    for file in files:
        if file.local.parent == folder:
            tokens = len(train_gpt.read_shard(file.local))
            entries[file.local.name] = {"bytes": file.size, "tokens": tokens, "sha256": file.sha256}
    origin = {"tool": "download_fineweb.py", "repository": hub.repository, "folder": hub.folder}
    facts = {"made_by": origin, "files": dict(sorted(entries.items()))}
    for file in files:
        if file.local.suffix == ".model":
            facts["tokenizer"] = shards.tokenizer_entry(file.local, folder)
    shards.write_manifest(folder, **facts)


def check(folder: Path) -> str:
    """Verify every byte of `folder` with its manifest. Returns a summary. Raises UserError."""
    manifest = shards.read_manifest(folder)
    advice = "run this script without --check to download"
    require(manifest, f"{folder} has no {shards.MANIFEST}: {advice} the data")
    wrong = shards.problems(folder, manifest)
    if entry := manifest.get("tokenizer"):
        path = folder / entry["path"]
        if not path.is_file() or shards.file_sha256(path) != entry["sha256"]:
            wrong.append(f"{path} is missing or is not the tokenizer of the shards")
    require(not wrong, f"{'; '.join(wrong)}: {advice} again")
    return f"checksums are right: {len(manifest['files'])} shards in {folder}"


def download(arguments: argparse.Namespace, folder: Path) -> str:
    """Download, verify and record everything. Returns a summary. Raises UserError."""
    hub = Hub(arguments.variant)
    count, documents = arguments.train_shards, arguments.with_docs
    try:
        files = plan(hub, arguments.variant, count, arguments.target, documents)
    except UserError as error:
        held = " ".join((shards.read_manifest(folder) or {"files": {}})["files"])
        # The network failed, and the files are here.
        if error.__cause__ and not documents and "_val_" in held and held.count("_train_") >= count:
            return f"{check(folder)} (no update: {error})"
        raise
    with shards.locked(folder):
        fetched = have(files, hub)
        record(files, folder, hub)
    size = sum(file.size for file in files)
    counts = f"{len(files)} files, {fetched} of them downloaded now, {size:,} bytes"
    return f"complete: {counts}, in {folder}"


def end(*_) -> None:
    """The handler of Ctrl-C. The client's threads would first finish their files; it resumes these."""
    print("error: interrupted by Ctrl-C; start again to go on", file=sys.stderr, flush=True)
    os._exit(130)


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    others = ", ".join(REPOSITORIES)
    add("--variant", default="sp1024", help=f"{others}, or another one of the repository")
    add("--train-shards", type=int, default=80, help="100 million tokens, 200 MB each; default: 80")
    add("count", nargs="?", type=int, help="the same, as the challenge's script has it")
    add("--skip-manifest", action="store_true", help=argparse.SUPPRESS)  # also there
    add("--with-docs", action="store_true", help="the text of the documents as well (48 GB)")
    add("--check", action="store_true", help="verify the files without a download")
    add("--target", type=Path, default=TARGET, help="folder of datasets/ and tokenizers/")
    arguments = parser.parse_args()
    if arguments.count is not None:
        arguments.train_shards = arguments.count
    if arguments.train_shards < 0:
        parser.error("--train-shards must not be negative")
    folder = arguments.target / "datasets" / dataset_name(arguments.variant)
    if arguments.check:
        print(check(folder))
    else:
        signal.signal(signal.SIGINT, end)
        print(download(arguments, folder))


if __name__ == "__main__":
    program.run_program(main)
