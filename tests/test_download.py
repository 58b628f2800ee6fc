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


def manifest_of(tokenizer: str) -> dict:
    dataset = {"name": NAME, "tokenizer_name": "bpe", "stats": {"files_train": 3, "files_val": 1}}
    return {"datasets": [dataset], "tokenizers": [{"name": "bpe", "model_path": tokenizer}]}


@pytest.fixture
def published(tmp_path, data) -> Path:
    """The hub's files: 3 training shards, 1 validation shard, a tokenizer, the manifest."""
    root = tmp_path / "published"
    folder = root / "datasets" / "datasets" / NAME
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sizes = dict(train_000000=5000, train_000001=3000, train_000002=4000, val_000000=2000)
    for name, count in sizes.items():
        shards.write_shard(folder / f"fineweb_{name}.bin", rng.integers(4, 400, count))
    tokenizer = root / "datasets" / "tokenizers" / "fineweb_1024_bpe.model"
    tokenizer.parent.mkdir()
    shutil.copy(data / "tokenizer.model", tokenizer)
    text = json.dumps(manifest_of(f"tokenizers/{tokenizer.name}"))
    (root / "datasets" / "manifest.json").write_text(text)
    return root


@pytest.fixture
def hub(published):
    server = Hub(published, REPOSITORY)
    yield server
    server.close()


@pytest.fixture
def download(hub, tmp_path):
    """A function that runs the script with its own cache and target."""
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
    environment |= {"MATCHED_FINEWEB_REPO_ID": REPOSITORY}

    def go(*arguments, program="download_fineweb.py", status=0, **changes):
        hub.requests.clear()
        line = [ROOT / "data" / program, "--target", tmp_path / "data", *arguments]
        return run(line, environment | changes, tmp_path, status=status)

    return go


def test_everything_arrives_once_and_where_it_is_looked_for(download, hub, tmp_path, published):
    assert "complete: 3 files, 3 of them downloaded now" in download("--train-shards", 1).stdout
    folder = tmp_path / "data" / "datasets" / NAME
    hp = train_gpt.Hyperparameters()
    assert (tmp_path / hp.data_path).samefile(folder), "where train_gpt.py looks"
    assert (tmp_path / hp.tokenizer_path).is_file(), "where train_gpt.py looks"
    for path in folder.glob("*.bin"):
        original = published / "datasets" / "datasets" / NAME / path.name
        assert path.read_bytes() == original.read_bytes()
        assert path.stat().st_nlink == 2, "a hard link to the cache, not a copy"
    train_gpt.check_manifest(str(folder), str(tmp_path / hp.tokenizer_path))
    assert "0 of them downloaded now" in download("--train-shards", 1).stdout
    assert hub.fetched() == []
    assert "1 of them downloaded now" in download("--train-shards", 2).stdout
    assert [Path(path).name for path in hub.fetched()] == ["fineweb_train_000001.bin"]
    manifest = shards.read_manifest(folder)
    assert sorted(manifest["files"]) == sorted(path.name for path in folder.glob("*.bin"))
    assert len(manifest["files"]) == 3
    download("--train-shards", 1)
    assert shards.read_manifest(folder) == manifest, "what was downloaded earlier stays in it"


def test_check_needs_no_network_and_finds_damage(download, hub, tmp_path):
    assert "no manifest.json" in download("--check", status=1).stderr
    download("--train-shards", 2)
    assert "checksums are right: 3 shards" in download("--check").stdout
    assert hub.requests == []
    shard = tmp_path / "data" / "datasets" / NAME / "fineweb_train_000001.bin"
    with open(shard, "r+b") as file:  # the cache has the same file
        file.seek(2000)
        file.write(b"\x05\x05")
    damaged = f"{shard} is not the file in manifest.json"
    assert damaged in download("--check", status=1).stderr
    assert hub.requests == []
    assert "1 of them downloaded now" in download("--train-shards", 2).stdout
    assert set(map(os.path.basename, hub.fetched())) == {shard.name}
    download("--check")
    (shard.parent / "fineweb_train_000009.bin").write_bytes(shard.read_bytes())
    assert "000009.bin is not in manifest.json" in download("--check", status=1).stderr
    (shard.parent / "fineweb_train_000009.bin").unlink()
    shard.unlink()
    assert "is in manifest.json but does not exist" in download("--check", status=1).stderr


def test_a_stale_manifest_is_refreshed(download, hub, published, tmp_path):
    download("--train-shards", 2)
    remote = published / "datasets" / "manifest.json"
    shard = published / "datasets" / "datasets" / NAME / "fineweb_train_000003.bin"
    shards.write_shard(shard, np.arange(4, 300))
    remote.write_text(remote.read_text().replace('"files_train": 3', '"files_train": 4'))
    hub.commit = "f" * 40
    assert "2 of them downloaded now" in download("--train-shards", 4).stdout
    assert (tmp_path / "data" / "datasets" / NAME / shard.name).is_file()


def test_no_network(download, hub):
    download("--train-shards", 1)
    hub.close()
    result = download("--train-shards", 1)
    assert "checksums are right" in result.stdout and "no update" in result.stdout
    told = download("--train-shards", 2, status=1).stderr
    assert "check the network" in told and len(told.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, changes, part",
    [
        (["--variant", "sp4096"], {}, "set MATCHED_FINEWEB_REPO_ID=kevclark"),
        (["--variant", "sp77"], {}, "has no variant sp77: set --variant to one of sp1024, sp4096"),
        (["--with-docs"], {}, "somebody/some-data lacks datasets/docs_selected.jsonl: tell its"),
        (["--train-shards", 9], {}, "has 3 training shards of sp1024, not 9"),
        ([], {"MATCHED_FINEWEB_REPO_ID": "no/body"}, "could not get no/body"),
        ([], {"MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "elsewhere"}, "could not get somebody/some-da"),
        (["--target", "/dev/null/none"], {}, "cannot write /dev/null/none/datasets"),
    ],
)
def test_errors_are_one_sentence(download, arguments, changes, part):
    assert part in sentence(download("--train-shards", 1, *arguments, status=1, **changes))


def test_a_folder_that_cannot_be_written_is_named_before_the_download(download, hub, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizers").touch()
    told = sentence(download("--train-shards", 1, status=1))
    assert told.startswith(f"error: cannot write {tmp_path}/data/tokenizers: File exists")
    assert not any(path.endswith(".bin") for path in hub.fetched())


def test_one_program_writes_to_a_folder(download, tmp_path):
    with shards.locked(tmp_path / "data" / "datasets" / NAME):
        told = sentence(download("--train-shards", 1, status=1))
        assert told.startswith("error: another program writes to ")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_limit_of_the_hub_is_waited_for(download, hub, method):
    """By its client, once the list of files is here."""
    hub.limited = {method: 2}
    result = download("--train-shards", 1)
    assert "complete: 3 files" in result.stdout and "Error 429 " in result.stderr


def test_ctrl_c_does_not_wait_for_the_files(hub, tmp_path):
    hub.delay = 40
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
    command = [ROOT / "data" / "download_fineweb.py", "--target", tmp_path, "--train-shards", 1]
    process = start(command, environment | {"MATCHED_FINEWEB_REPO_ID": REPOSITORY}, tmp_path)
    while not any(path.endswith(".bin") for path in hub.fetched()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert said.endswith("error: interrupted by Ctrl-C; start again to go on\n"), said
    assert process.returncode == 130 and "Traceback" not in said


@pytest.mark.parametrize(
    "path", [f"datasets/{NAME}/fineweb_val_000000.bin", "tokenizers/fineweb_1024_bpe.model"]
)
def test_wrong_content_is_not_accepted(download, hub, path, tmp_path):
    hub.corrupt = {f"datasets/{path}"}
    told = download("--train-shards", 0, status=1).stderr
    assert f"{Path(path).name} has a wrong size or checksum after the download" in told
    # A folder without a manifest is incomplete
    assert not list((tmp_path / "data").rglob("manifest.json"))


def test_exact_bytes_and_documents_come_too(download, published, tmp_path):
    """The bytes of validation tokens are in some repositories; the documents are asked for."""
    folder = published / "datasets" / "datasets" / NAME
    sidecar = folder / "fineweb_val_bytes_000000.bin"
    documents = [published / "datasets" / name for name in download_fineweb.DOCUMENTS]
    shards.write_shard(sidecar, np.full(2000, 3))
    for path in documents:
        path.write_text("{}")
    download("--train-shards", 1, "--with-docs")
    local = tmp_path / "data" / "datasets" / NAME
    assert (local / sidecar.name).read_bytes() == sidecar.read_bytes()
    assert sidecar.name in shards.read_manifest(local)["files"]
    assert all((tmp_path / "data" / path.name).is_file() for path in documents)
    download("--check")


@pytest.mark.parametrize("options", ["--train-shards 2", "2 --variant sp1024 --skip-manifest"])
def test_the_challenges_command(download, options, tmp_path):
    result = download(*options.split(), program="cached_challenge_fineweb.py")
    folder = tmp_path / "data" / "datasets" / NAME
    assert "complete: 4 files" in result.stdout and len(list(folder.glob("*train*.bin"))) == 2


def test_too_little_disk(tmp_path, monkeypatch):
    files = [
        download_fineweb.Wanted(n, tmp_path / n, size) for n, size in (("a", 1000), ("b", 500))
    ]
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
