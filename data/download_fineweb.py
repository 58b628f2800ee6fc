#!/usr/bin/env python3
"""Download the challenge's published shards and tokenizer from the Hugging Face hub.

    python data/download_fineweb.py                         # sp1024: 80 training shards (16 GB), all of validation
    python data/download_fineweb.py --train-shards 1        # enough for a first try
    python data/download_fineweb.py --check                 # verify the files; needs no network
    python data/download_fineweb.py --variant sp8192        # 8,192 pieces, from the repository that has them

The hub's client downloads into its cache: several files at once, with broken connections resumed
and complete files kept after an interruption. The files are then linked (copied if the cache is on
another file system) into data/datasets/fineweb10B_<variant>/ and data/tokenizers/, where
train_gpt.py looks for them. Files are verified with the hub's checksums before the download, so
correct ones are not downloaded again, and after it. As in the challenge's own script,
MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX select another repository and another
folder of it; HF_HOME moves the cache. If the repository has the exact bytes of the validation
tokens (fineweb_val_bytes_NNNNNN.bin), they come too, as the score needs them.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import shards
import train_gpt
from train_gpt import UserError

CASEOPS = "sp8192_lossless_caps_caseops_v1_reserved"
# The repository of each variant: the challenge's own has 1,024 pieces only (its issues #899, #1189).
REPOSITORIES = {
    "sp1024": "willdepueoai/parameter-golf",
    "sp4096": "kevclark/parameter-golf",
    "sp8192": "kevclark/parameter-golf",
    CASEOPS: "romeerp/parameter-golf-caseops-v1",
}
DOCUMENTS = ("docs_selected.jsonl", "docs_selected.source_manifest.json")
ATTEMPTS = 3  # while the hub limits requests
LONGEST_WAIT = 300  # seconds, the window of its limits
TARGET = Path(__file__).resolve().parent


class Remote(NamedTuple):
    """The repository and its folder with the data."""

    repository: str
    folder: str

    @classmethod
    def from_env(cls, environ: dict[str, str], variant: str) -> "Remote":
        """The variant's repository, unless the environment names another one."""
        usual = REPOSITORIES.get(variant, REPOSITORIES["sp1024"])
        return cls(
            environ.get("MATCHED_FINEWEB_REPO_ID", usual),
            environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/"),
        )


class Wanted(NamedTuple):
    """A file to download: its path in the repository and, once the hub has been asked, its size and
    checksum."""

    path: str
    local: Path
    size: int = 0
    sha256: str = ""  # of large files
    git_sha1: str = ""  # of all files: SHA-1 of "blob <size>\0" and the content

    def is_there(self, seen=lambda count: None) -> bool:
        """Whether the local file has this size and checksum."""
        if not self.local.is_file() or self.local.stat().st_size != self.size:
            return False
        if self.sha256:
            return shards.file_sha256(self.local, seen) == self.sha256
        return (
            hashlib.sha1(f"blob {self.size}\0".encode() + self.local.read_bytes()).hexdigest()
            == self.git_sha1
        )


def dataset_name(variant: str) -> str:
    return f"fineweb10B_{variant}"


def plan(
    manifest: dict, variant: str, train_shards: int, remote: Remote, target: Path
) -> list[Wanted]:
    """The files of a variant in the hub's manifest: tokenizer, training shards, validation. Raises
    UserError."""
    try:
        datasets = {entry["name"]: entry for entry in manifest["datasets"]}
        name = dataset_name(variant)
        if name not in datasets:
            there = ", ".join(sorted(other.removeprefix("fineweb10B_") for other in datasets))
            lacking = f"{remote.repository} has no variant {variant}"
            other = REPOSITORIES.get(variant, remote.repository)
            if other != remote.repository:
                raise UserError(f"{lacking}: set MATCHED_FINEWEB_REPO_ID={other}, which has it")
            known = f"set --variant to one of {there}, or to one of {', '.join(REPOSITORIES)}"
            raise UserError(f"{lacking}: {known}")
        counts = {
            split: int(datasets[name]["stats"][f"files_{split}"]) for split in ("train", "val")
        }
        (tokenizer,) = (
            entry
            for entry in manifest["tokenizers"]
            if entry["name"] == datasets[name]["tokenizer_name"]
        )
        models = [
            str(tokenizer[key])
            for key in ("model_path", "vocab_path", "path")
            if tokenizer.get(key)
        ]
        if not models:
            raise KeyError("model_path")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{remote.folder}/manifest.json of {remote.repository} has an unknown format "
            f"({type(error).__name__}: {error}): update this script"
        ) from error
    if train_shards > counts["train"]:
        there = f"{remote.repository} has {counts['train']} training shards of {variant}"
        raise UserError(f"{there}, not {train_shards}: lower --train-shards")
    files = [
        f"datasets/{name}/fineweb_{split}_{number:06d}.bin"
        for split, count in (("train", train_shards), ("val", counts["val"]))
        for number in range(count)
    ]
    # A path in the manifest must not lead to another folder.
    tokenizers = [f"tokenizers/{PurePosixPath(model).name}" for model in models]
    return [Wanted(f"{remote.folder}/{path}", target / path) for path in (*tokenizers, *files)]


def sidecars(files: list[Wanted]) -> list[Wanted]:
    """The exact bytes of the validation shards among these files, which some repositories have."""
    found = []
    for file in files:
        name = file.local.name.replace("_val_", "_val_bytes_")
        if name != file.local.name:
            path = str(PurePosixPath(file.path).with_name(name))
            found.append(Wanted(path, file.local.with_name(name)))
    return found


def seconds_to_wait(error: BaseException | None) -> int | None:
    """The seconds for which a limit on requests behind this exception lasts, by the hub's answer,
    else a window of its limits; None if there is no such limit."""
    while error:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) == 429:
            after = response.headers.get("Retry-After", "")
            # "api";r=0;t=55, by the draft of the IETF
            left = re.search(r";t=(\d+)", response.headers.get("RateLimit", ""))
            return int(after) if after.isdecimal() else int(left[1]) if left else LONGEST_WAIT
        error = error.__cause__ or error.__context__
    return None


class Hub:
    """The hub's client at one revision of the repository. Its failures become UserErrors."""

    def __init__(self, remote: Remote):
        try:
            import huggingface_hub
            from huggingface_hub import constants
        except ImportError as error:
            raise UserError(
                "huggingface_hub is not installed: pip install -r requirements-dev.txt"
            ) from error
        self.client, self.remote, self.api = huggingface_hub, remote, huggingface_hub.HfApi()
        self.cache = Path(constants.HF_HUB_CACHE)
        info = self._ask(self.api.dataset_info, remote.repository, timeout=20)
        self.here = dict(repo_id=remote.repository, repo_type="dataset", revision=info.sha)

    def _ask(self, function, *arguments, **options):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return function(*arguments, **options)
            except UserError:
                raise
            # The client's own, its HTTP library's and the operating system's exceptions
            except Exception as error:
                seconds = seconds_to_wait(error)
                if seconds is None:
                    reason = (str(error).strip().splitlines() or [""])[0][:200]
                    raise UserError(
                        f"could not get {self.remote.repository} from the hub ({type(error).__name__}: {reason}): "
                        "check the network, the disk and MATCHED_FINEWEB_REPO_ID, then start again; complete "
                        "files are kept"
                    ) from error
                limit = f"the hub limits your requests (HTTP 429) and asks to wait {seconds} s"
                if attempt == ATTEMPTS or seconds > LONGEST_WAIT:
                    raise UserError(
                        f"{limit}: start again then, or set HF_TOKEN, as an account may ask more; "
                        "complete files are kept"
                    ) from error
                print(f"{limit}: waiting", file=sys.stderr, flush=True)
                time.sleep(seconds)

    def manifest(self) -> dict:
        """The hub's current manifest."""
        path = self._ask(
            self.client.hf_hub_download, filename=f"{self.remote.folder}/manifest.json", **self.here
        )
        return self._ask(lambda: json.loads(Path(path).read_bytes()))

    def described(self, files: list[Wanted], optional: bool = False) -> list[Wanted]:
        """The files with the hub's sizes and checksums. If the hub lacks one, raises UserError or,
        for optional files, leaves it out."""
        found = {
            info.path: info
            for info in self._ask(
                self.api.get_paths_info, paths=[file.path for file in files], **self.here
            )
        }
        if missing := [file.path for file in files if file.path not in found and not optional]:
            raise UserError(
                f"{self.remote.repository} lacks {missing[0]}: tell its owner, or name another "
                "repository by MATCHED_FINEWEB_REPO_ID"
            )
        files = [file for file in files if file.path in found]
        infos = [found[file.path] for file in files]
        return [
            file._replace(
                size=info.size, sha256=info.lfs.sha256 if info.lfs else "", git_sha1=info.blob_id
            )
            for file, info in zip(files, infos, strict=True)
        ]

    def fetch(self, files: list[Wanted], again: bool) -> Path:
        """Download files into the client's cache. `again` replaces cached files. Returns the cached
        repository."""
        patterns = [file.path for file in files]

        def fetched() -> Path:
            options = {"allow_patterns": patterns, "force_download": again}
            folder = Path(self.client.snapshot_download(**options, **self.here))
            for path in patterns:  # without the network the client warns and returns what it has
                (folder / path).stat()
            return folder

        return self._ask(fetched)


def existing(path: Path) -> Path:
    """The path or its nearest existing parent."""
    return path if path.exists() else existing(path.parent)


def check_space(files: list[Wanted], cache: Path, target: Path) -> None:
    """Raises UserError if the files do not fit into the cache or, on another file system, into the
    target."""
    size = sum(file.size for file in files)
    places = {
        existing(place).stat().st_dev: existing(place)
        for place in (cache.resolve(), target.resolve())
    }
    for place in places.values():
        free = shutil.disk_usage(place).free
        if free < size:
            raise UserError(
                f"the download has {size:,} bytes, but the disk of {place} has {free:,} left: "
                "free some space, lower --train-shards, or set HF_HOME to a folder on a larger disk"
            )


def require_writable(folders: Iterable[Path]) -> None:
    """Make these folders. Raises UserError, before the download, if one cannot be written."""
    for folder in sorted(folders):
        with train_gpt.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()


def link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file behind `source`, or a copy if the file system does not
    allow it."""
    partial = target.with_name(target.name + ".partial")
    with train_gpt.writing(target):
        partial.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), partial)
        except OSError:
            shutil.copyfile(source, partial)
        os.replace(partial, target)
        partial.unlink(missing_ok=True)  # replacing a link by a link to the same file leaves both


def not_there(files: Iterable[Wanted]) -> list[Wanted]:
    """The files that are missing or differ from the hub's. Shows a progress bar while it reads."""
    from tqdm import tqdm  # the hub's client brings it

    files = list(files)
    present = sum(file.size for file in files if file.local.is_file())
    with tqdm(
        total=present,
        unit="B",
        unit_scale=True,
        desc="verifying",
        disable=None if present else True,
    ) as bar:
        return [file for file in files if not file.is_there(bar.update)]


def have(files: list[Wanted], hub: Hub, target: Path) -> int:
    """Download and link what is missing or wrong. Returns the number of downloaded files. Raises
    UserError."""
    missing = not_there(files)
    check_space(missing, hub.cache, target)
    fetched = len(missing)
    # A damaged link means a damaged file in the cache, so the second try replaces that
    for again in (False, True):
        if missing:
            snapshot = hub.fetch(missing, again)
            for file in missing:
                link(snapshot / file.path, file.local)
            missing = not_there(missing)
    if missing:
        raise UserError(
            f"{missing[0].local} has a wrong size or checksum after the download: start again"
        )
    return fetched


def record(files: list[Wanted], folder: Path, remote: Remote) -> None:
    """Write the manifest of `folder` for train_gpt.py and --check. Shards downloaded earlier stay
    in it."""
    model = next((file.local for file in files if file.local.suffix == ".model"), None)
    before = (
        (shards.read_manifest(folder) or {"files": {}})["files"]
        if (folder / shards.MANIFEST).exists()
        else {}
    )
    entries = {name: entry for name, entry in before.items() if (folder / name).is_file()}
    for file in files:
        if file.local.parent == folder:
            entries[file.local.name] = {
                "bytes": file.size,
                "tokens": len(train_gpt.read_shard(file.local)),
                "sha256": file.sha256,
            }
    made_by = {
        "tool": "download_fineweb.py",
        "repository": remote.repository,
        "folder": remote.folder,
    }
    tokenizer = {"tokenizer": shards.tokenizer_entry(model, folder)} if model else {}
    shards.write_manifest(folder, made_by=made_by, **tokenizer, files=dict(sorted(entries.items())))


def check(variant: str, target: Path) -> str:
    """Verify every byte of the local files with the local manifest. Returns a summary. Raises
    UserError."""
    folder = target / "datasets" / dataset_name(variant)
    manifest = shards.read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder} has no {shards.MANIFEST}: run this script without --check to download the data"
        )
    wrong = shards.problems(folder, manifest)
    if "tokenizer" in manifest:
        tokenizer = folder / manifest["tokenizer"]["path"]
        if (
            not tokenizer.is_file()
            or shards.file_sha256(tokenizer) != manifest["tokenizer"]["sha256"]
        ):
            wrong.append(f"{tokenizer} is missing or is not the tokenizer of the shards")
    strangers = {path.name for path in folder.glob("*.bin")} - set(manifest["files"])
    wrong += [
        f"{folder / name} is not in {shards.MANIFEST}, but would be read: remove it"
        for name in sorted(strangers)
    ]
    if wrong:
        raise UserError("; ".join(wrong) + ": run this script without --check to download again")
    return f"checksums are right: {len(manifest['files'])} shards in {folder}"


def download(
    variant: str, train_shards: int, remote: Remote, target: Path, documents: bool = False
) -> str:
    """Download, verify and record everything; `documents`: their text as well. Returns a summary.
    Raises UserError."""
    folder = target / "datasets" / dataset_name(variant)
    try:
        hub = Hub(remote)
    except UserError as error:
        held = (shards.read_manifest(folder) or {"files": {}})["files"]
        if (
            not documents
            and any("_val_" in name for name in held)
            and sum("_train_" in name for name in held) >= train_shards
        ):
            return f"{check(variant, target)} (no update: {error})"
        raise
    files = hub.described(plan(hub.manifest(), variant, train_shards, remote, target))
    files += hub.described(sidecars(files), optional=True)
    if documents:
        texts = [Wanted(f"{remote.folder}/{name}", target / name) for name in DOCUMENTS]
        files += hub.described(texts)
    with shards.locked(folder):
        require_writable({file.local.parent for file in files})
        fetched = have(files, hub, target)
        record(files, folder, remote)
    size = sum(file.size for file in files)
    return f"complete: {len(files)} files, {fetched} of them downloaded now, {size:,} bytes, in {folder}"


def end(*_) -> None:
    """The handler of Ctrl-C. The client's threads would first finish their files; it resumes these."""
    print("error: interrupted by Ctrl-C; start again to go on", file=sys.stderr, flush=True)
    os._exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variant",
        default="sp1024",
        help=f"{', '.join(REPOSITORIES)}, or another one of the repository; default: sp1024",
    )
    parser.add_argument(
        "--train-shards", type=int, default=80, help="100 million tokens, 200 MB each; default: 80"
    )
    parser.add_argument(
        "--with-docs", action="store_true", help="the text of the documents as well (48 GB)"
    )
    parser.add_argument("--check", action="store_true", help="verify the files without a download")
    parser.add_argument(
        "--target",
        type=Path,
        default=TARGET,
        help="folder of datasets/ and tokenizers/ (default: data)",
    )
    arguments = parser.parse_args()
    if arguments.train_shards < 0:
        parser.error("--train-shards must not be negative")
    if arguments.check:
        print(check(arguments.variant, arguments.target))
    else:
        signal.signal(signal.SIGINT, end)
        remote = Remote.from_env(dict(os.environ), arguments.variant)
        wanted = (arguments.variant, arguments.train_shards, remote, arguments.target)
        print(download(*wanted, arguments.with_docs))


if __name__ == "__main__":
    program.run_program(main)
