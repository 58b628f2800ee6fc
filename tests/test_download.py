"""data/download_fineweb.py with a stand-in for the hub (tests/hub.py)."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import download_fineweb
import shards
import train_gpt
from conftest import ROOT, run, sentence, start, user_error, variables
from hub import Hub

REPOSITORY, NAME = "somebody/some-data", "fineweb10B_sp1024"
LOCAL = Path("data", "datasets", NAME)


def manifest_of(tokenizer: str) -> dict:
    dataset = {"name": NAME, "tokenizer_name": "bpe", "stats": {"files_train": 3, "files_val": 1}}
    return {"datasets": [dataset], "tokenizers": [{"name": "bpe", "model_path": tokenizer}]}


@pytest.fixture
def published(tmp_path, data) -> Path:
    """The hub's folder of shards: 3 of training, 1 of validation; a tokenizer, the manifest."""
    root = tmp_path / "published" / "datasets"
    (root / "datasets" / NAME).mkdir(parents=True)
    rng = np.random.default_rng(0)
    sizes = dict(train_000000=5000, train_000001=3000, train_000002=4000, val_000000=2000)
    for name, count in sizes.items():
        path = root / "datasets" / NAME / f"fineweb_{name}.bin"
        shards.write_shard(path, rng.integers(4, 400, count))
    (root / "tokenizers").mkdir()
    shutil.copy(data / "tokenizer.model", root / "tokenizers" / "fineweb_1024_bpe.model")
    text = json.dumps(manifest_of("tokenizers/fineweb_1024_bpe.model"))
    (root / "manifest.json").write_text(text)
    return root / "datasets" / NAME


@pytest.fixture
def hub(published, tmp_path):
    server = Hub(tmp_path / "published", REPOSITORY)
    server.variables = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "cache")}
    server.variables |= {"MATCHED_FINEWEB_REPO_ID": REPOSITORY}
    yield server
    server.close()


@pytest.fixture
def download(hub, tmp_path):
    """A function that runs the script with its own cache and target."""

    def go(options, program="download_fineweb.py", status=0, **changes):
        hub.requests.clear()
        line = [ROOT / "data" / program, "--target", tmp_path / "data", *options.split()]
        return run(line, hub.variables | changes, tmp_path, status=status)

    return go


def test_everything_arrives_once_and_where_it_is_looked_for(download, hub, tmp_path, published):
    assert "complete: 3 files, 3 of them downloaded now" in download("--train-shards 1").stdout
    hp, local = train_gpt.Hyperparameters(), tmp_path / LOCAL
    assert (tmp_path / hp.data_path).samefile(local), "where train_gpt.py looks"
    assert (tmp_path / hp.tokenizer_path).is_file(), "where train_gpt.py looks"
    for path in local.glob("*.bin"):
        assert path.read_bytes() == (published / path.name).read_bytes()
        assert path.stat().st_nlink == 2, "a hard link to the cache, not a copy"
    train_gpt.check_manifest(str(local), str(tmp_path / hp.tokenizer_path))
    assert "0 of them downloaded" in download("--train-shards 1").stdout and hub.fetched() == []
    assert "1 of them downloaded now" in download("--train-shards 2").stdout
    assert [Path(path).name for path in hub.fetched()] == ["fineweb_train_000001.bin"]
    manifest = shards.read_manifest(local)
    assert sorted(manifest["files"]) == sorted(path.name for path in local.glob("*.bin"))
    assert len(manifest["files"]) == 3
    download("--train-shards 1")
    assert shards.read_manifest(local) == manifest, "what was downloaded earlier stays in it"
    # A manifest of the cache that is older than the hub's is refreshed
    remote = published.parents[1] / "manifest.json"
    shards.write_shard(published / "fineweb_train_000003.bin", np.arange(4, 300))
    remote.write_text(remote.read_text().replace('"files_train": 3', '"files_train": 4'))
    hub.commit = "f" * 40
    assert "2 of them downloaded now" in download("--train-shards 4").stdout
    assert (local / "fineweb_train_000003.bin").is_file()


def test_check_needs_no_network_and_finds_damage(download, hub, tmp_path):
    def wrong() -> str:
        told = download("--check", status=1).stderr
        assert hub.requests == []
        return told

    assert "no manifest.json" in wrong()
    download("--train-shards 2")
    assert "checksums are right: 3 shards" in download("--check").stdout and hub.requests == []
    shard, other = (tmp_path / LOCAL / f"fineweb_train_00000{number}.bin" for number in (1, 9))
    with open(shard, "r+b") as file:  # the cache has the same file
        file.seek(2000)
        file.write(b"\x05\x05")
    assert f"{shard} is not the file in manifest.json" in wrong()
    assert "1 of them downloaded now" in download("--train-shards 2").stdout
    assert set(map(os.path.basename, hub.fetched())) == {shard.name}
    hub.close()
    told = download("--train-shards 2").stdout
    assert "checksums are right" in told and "no update" in told
    assert "check the network" in sentence(download("--train-shards 3", status=1))
    shutil.copy(shard, other)
    assert "000009.bin is not in manifest.json" in wrong()
    other.unlink()
    shard.unlink()
    assert "is in manifest.json but does not exist" in wrong()


@pytest.mark.parametrize(
    "options, changes, part",
    [
        ("--variant sp4096", {}, "set MATCHED_FINEWEB_REPO_ID=kevclark"),
        ("--variant sp77", {}, "has no variant sp77: set --variant to one of sp1024, sp4096"),
        ("--with-docs", {}, "somebody/some-data lacks datasets/docs_selected.jsonl: tell its"),
        ("--train-shards 9", {}, "has 3 training shards of sp1024, not 9"),
        ("", {"MATCHED_FINEWEB_REPO_ID": "no/body"}, "could not get no/body"),
        ("", {"MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "elsewhere"}, "could not get somebody/some-da"),
        ("--target /dev/null/none", {}, "cannot write /dev/null/none/datasets"),
    ],
)
def test_errors_are_one_sentence(download, options, changes, part):
    assert part in sentence(download(f"--train-shards 1 {options}", status=1, **changes))


def test_a_folder_that_cannot_be_written_is_named_before_the_download(download, hub, tmp_path):
    with shards.locked(tmp_path / LOCAL):
        told = sentence(download("--train-shards 1", status=1))
        assert told.startswith("error: another program writes to ")
    (tmp_path / "data" / "tokenizers").touch()
    told = sentence(download("--train-shards 1", status=1))
    assert told.startswith(f"error: cannot write {tmp_path}/data/tokenizers: File exists")
    assert not any(path.endswith(".bin") for path in hub.fetched())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_limit_of_the_hub_is_waited_for(download, hub, method):
    """By its client, once the list of files is here."""
    hub.limited = {method: 2}
    result = download("--train-shards 1")
    assert "complete: 3 files" in result.stdout and "Error 429 " in result.stderr


def test_ctrl_c_does_not_wait_for_the_files(hub, tmp_path):
    hub.delay = 40
    command = [ROOT / "data" / "download_fineweb.py", "--target", tmp_path, "--train-shards", 1]
    process = start(command, hub.variables, tmp_path)
    while not any(path.endswith(".bin") for path in hub.fetched()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert said.endswith("error: interrupted by Ctrl-C; start again to go on\n"), said
    assert process.returncode == 130 and "Traceback" not in said


@pytest.mark.parametrize("kind", ["fineweb_val_000000.bin", "fineweb_1024_bpe.model"])
def test_wrong_content_is_not_accepted(download, hub, kind, tmp_path):
    [path] = [name for name in hub.names() if name.endswith(kind)]
    hub.corrupt = {path}
    told = download("--train-shards 0", status=1).stderr
    assert f"{kind} has a wrong size or checksum after the download" in told
    # A folder without a manifest is incomplete
    assert not list((tmp_path / "data").rglob("manifest.json"))


@pytest.mark.parametrize("options", ["--train-shards 2", "2 --variant sp1024 --skip-manifest"])
def test_the_challenges_command(download, published, tmp_path, options):
    """The bytes of validation tokens are in some repositories; the documents are asked for."""
    sidecar, root, local = "fineweb_val_bytes_000000.bin", published.parents[1], tmp_path / LOCAL
    shards.write_shard(published / sidecar, np.full(2000, 3))
    for name in download_fineweb.DOCUMENTS:
        (root / name).write_text("{}")
    result = download(f"{options} --with-docs", program="cached_challenge_fineweb.py")
    count = 5 + len(download_fineweb.DOCUMENTS)
    assert f"complete: {count} files" in result.stdout
    assert len(list(local.glob("*train*.bin"))) == 2
    assert (local / sidecar).read_bytes() == (published / sidecar).read_bytes()
    assert sidecar in shards.read_manifest(local)["files"]
    assert all((tmp_path / "data" / name).is_file() for name in download_fineweb.DOCUMENTS)
    download("--check")


def test_too_little_disk(tmp_path, monkeypatch):
    wanted = download_fineweb.Wanted
    files = [wanted("a", tmp_path / "a", 1000), wanted("b", tmp_path / "b", 500)]
    download_fineweb.check_space(files, tmp_path / "not" / "yet")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=1499))
    expected = r"the download has 1,500 bytes, but the disk of .* has 1,499 left.*HF_HOME"
    with user_error(expected):
        download_fineweb.check_space(files, tmp_path)


def test_a_manifest_of_another_form_is_named():
    few = {"datasets": [{"name": NAME}], "tokenizers": []}
    for manifest in ({}, few, [], {"datasets": 3}, manifest_of("")):
        with user_error("manifest.json .* update this script"):
            download_fineweb.tokenizer_names(manifest, "sp1024")
    # None can place files elsewhere
    manifest = manifest_of("../../../etc/evil.model")
    assert download_fineweb.tokenizer_names(manifest, "sp1024") == ["evil.model"]
    # frontier.env and 2135.env look for the data where the download puts them
    for name in ("frontier", "2135"):
        folder = download_fineweb.dataset_name(download_fineweb.CASEOPS)
        assert Path(variables(name)["DATA_PATH"]).name == folder
