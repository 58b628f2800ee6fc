"""data/download_fineweb.py with a stand-in for the hub: an HTTP server on loopback with the hub's
URL scheme."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import download_fineweb
import shards
import train_gpt
from conftest import ROOT, start, user_error, variables
from hub import Hub

REPOSITORY, NAME = "somebody/some-data", "fineweb10B_sp1024"


def manifest_of(tokenizer: str) -> dict:
    stats = {"files_train": 3, "files_val": 1}
    return {
        "datasets": [{"name": NAME, "tokenizer_name": "bpe", "stats": stats}],
        "tokenizers": [{"name": "bpe", "model_path": tokenizer}],
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory, data) -> Path:
    """The hub's files: 3 training shards, 1 validation shard, a
    tokenizer, the manifest."""
    root = tmp_path_factory.mktemp("published")
    folder = root / "datasets" / "datasets" / NAME
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sizes = dict(train_000000=5000, train_000001=3000, train_000002=4000, val_000000=2000)
    for name, count in sizes.items():
        shards.write_shard(folder / f"fineweb_{name}.bin", rng.integers(4, 400, count))
    tokenizers = root / "datasets" / "tokenizers"
    tokenizers.mkdir()
    shutil.copy(data / "tokenizer.model", tokenizers / "fineweb_1024_bpe.model")
    text = json.dumps(manifest_of("tokenizers/fineweb_1024_bpe.model"))
    (root / "datasets" / "manifest.json").write_text(text)
    return root


@pytest.fixture
def hub(published):
    server = Hub(published, REPOSITORY)
    yield server
    server.close()


@pytest.fixture
def command(hub, tmp_path):
    """A function that starts the script with its own cache and target."""
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
    environment |= {"MATCHED_FINEWEB_REPO_ID": REPOSITORY}

    def begin(*arguments, program="download_fineweb.py", **changes) -> subprocess.Popen:
        hub.requests.clear()
        line = [ROOT / "data" / program, "--target", tmp_path / "data", *arguments]
        return start(line, environment | changes, tmp_path)

    return begin


@pytest.fixture
def download(command):
    """A function that runs the script until it ends."""

    def go(*arguments, **changes) -> subprocess.CompletedProcess:
        process = command(*arguments, **changes)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return go


def test_everything_arrives_once_and_where_it_is_looked_for(download, hub, tmp_path, published):
    result = download("--train-shards", 1)
    assert result.returncode == 0, result.stderr
    assert "complete: 3 files, 3 of them downloaded now" in result.stdout
    folder = tmp_path / "data" / "datasets" / NAME
    hp = train_gpt.Hyperparameters()
    assert (tmp_path / hp.data_path).samefile(folder), "where train_gpt.py looks"
    assert (tmp_path / hp.tokenizer_path).is_file(), "where train_gpt.py looks"
    for path in folder.glob("*.bin"):
        original = published / "datasets" / "datasets" / NAME / path.name
        assert path.read_bytes() == original.read_bytes()
        assert path.stat().st_nlink == 2, "a hard link to the cache, not a copy"
    train_gpt.check_manifest(str(folder), str(tmp_path / hp.tokenizer_path))
    result = download("--train-shards", 1)
    assert "0 of them downloaded now" in result.stdout
    assert hub.fetched() == []
    result = download("--train-shards", 2)
    assert "1 of them downloaded now" in result.stdout
    assert [Path(path).name for path in hub.fetched()] == ["fineweb_train_000001.bin"]
    manifest = shards.read_manifest(folder)
    assert sorted(manifest["files"]) == sorted(path.name for path in folder.glob("*.bin"))
    assert len(manifest["files"]) == 3
    assert download("--train-shards", 1).returncode == 0
    assert shards.read_manifest(folder) == manifest, "what was downloaded earlier stays in it"


def test_check_needs_no_network_and_finds_damage(download, hub, tmp_path):
    assert "no manifest.json" in download("--check").stderr
    assert download("--train-shards", 2).returncode == 0
    result = download("--check")
    assert result.returncode == 0, result.stderr
    assert "checksums are right: 3 shards" in result.stdout
    assert hub.requests == []
    shard = tmp_path / "data" / "datasets" / NAME / "fineweb_train_000001.bin"
    with open(shard, "r+b") as file:  # the cache has the same file
        file.seek(2000)
        file.write(b"\x05\x05")
    result = download("--check")
    assert result.returncode == 1
    assert f"{shard} is not the file in manifest.json" in result.stderr
    assert hub.requests == []
    result = download("--train-shards", 2)
    assert result.returncode == 0 and "1 of them downloaded now" in result.stdout
    assert set(map(os.path.basename, hub.fetched())) == {shard.name}
    assert download("--check").returncode == 0
    (shard.parent / "fineweb_train_000009.bin").write_bytes(shard.read_bytes())
    assert "000009.bin is not in manifest.json" in download("--check").stderr
    (shard.parent / "fineweb_train_000009.bin").unlink()
    shard.unlink()
    assert "cannot read shard" in download("--check").stderr


def test_a_stale_manifest_is_refreshed(download, hub, published, tmp_path):
    assert download("--train-shards", 2).returncode == 0
    remote = published / "datasets" / "manifest.json"
    old = remote.read_text()
    shard = published / "datasets" / "datasets" / NAME / "fineweb_train_000003.bin"
    try:
        shards.write_shard(shard, np.arange(4, 300))
        remote.write_text(old.replace('"files_train": 3', '"files_train": 4'))
        hub.commit = "f" * 40
        result = download("--train-shards", 4)
        assert result.returncode == 0 and "2 of them downloaded now" in result.stdout, result.stderr
        assert (tmp_path / "data" / "datasets" / NAME / shard.name).is_file()
    finally:
        remote.write_text(old)
        shard.unlink()


def test_no_network(download, hub):
    assert download("--train-shards", 1).returncode == 0
    hub.close()
    result = download("--train-shards", 1)
    assert result.returncode == 0, result.stderr
    assert "checksums are right" in result.stdout and "no update" in result.stdout
    result = download("--train-shards", 2)
    assert result.returncode == 1
    assert "check the network" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, changes, part",
    [
        (["--variant", "sp4096"], {}, "set MATCHED_FINEWEB_REPO_ID=kevclark"),
        (["--variant", "sp77"], {}, "has no variant sp77: set --variant to one of sp1024, or to"),
        (["--with-docs"], {}, "somebody/some-data lacks datasets/docs_selected.jsonl: tell its"),
        (["--train-shards", 9], {}, "has 3 training shards of sp1024, not 9"),
        ([], {"MATCHED_FINEWEB_REPO_ID": "no/body"}, "could not get no/body"),
        ([], {"MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "elsewhere"}, "could not get somebody/some-da"),
        (["--target", "/proc/none"], {}, "the disk of /proc has 0 left"),
        (["--target", "/dev/null/none"], {}, "cannot write /dev/null/none/tokenizers"),
    ],
)
def test_errors_are_one_sentence(download, arguments, changes, part):
    result = download("--train-shards", 1, *arguments, **changes)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and part in last and "Traceback" not in result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize(
    "path", [f"datasets/{NAME}/fineweb_val_000000.bin", "tokenizers/fineweb_1024_bpe.model"]
)
def test_wrong_content_is_not_accepted(download, hub, path, tmp_path):
    hub.corrupt = {f"datasets/{path}"}
    result = download("--train-shards", 0)
    assert result.returncode == 1
    assert f"{Path(path).name} has a wrong size or checksum after the download" in result.stderr
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
    try:
        result = download("--train-shards", 1, "--with-docs")
        assert result.returncode == 0, result.stderr
        local = tmp_path / "data" / "datasets" / NAME
        assert (local / sidecar.name).read_bytes() == sidecar.read_bytes()
        assert sidecar.name in shards.read_manifest(local)["files"]
        assert all((tmp_path / "data" / path.name).is_file() for path in documents)
        assert download("--check").returncode == 0
    finally:
        for path in (sidecar, *documents):
            path.unlink()


@pytest.mark.parametrize(
    "words", [["--train-shards", "2"], ["2", "--variant", "sp1024", "--skip-manifest"]]
)
def test_the_challenges_command(command, words, tmp_path):
    process = command(*words, program="cached_challenge_fineweb.py")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    folder = tmp_path / "data" / "datasets" / NAME
    assert "complete: 4 files" in out and len(list(folder.glob("*train*.bin"))) == 2


def test_too_little_disk(tmp_path, monkeypatch):
    sizes = {"a": 1000, "b": 500}
    files = [download_fineweb.Wanted(n, tmp_path / n, size=size) for n, size in sizes.items()]
    download_fineweb.check_space(files, tmp_path / "not" / "yet", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=1499))
    expected = r"the download has 1,500 bytes, but the disk of .* has 1,499 left.*HF_HOME"
    with user_error(expected):
        download_fineweb.check_space(files, tmp_path, tmp_path / "data")


def test_a_manifest_of_another_form_is_named():
    remote = download_fineweb.Remote("a/b", "c")
    sentence = "c/manifest.json of a/b has an unknown format"
    for manifest in ({}, {"datasets": [{"name": NAME}], "tokenizers": []}, [], {"datasets": 3}):
        with user_error(sentence):
            download_fineweb.plan(manifest, "sp1024", 1, remote, Path("x"))
    # None can place files elsewhere
    manifest = manifest_of("../../../etc/evil.model")
    files = download_fineweb.plan(manifest, "sp1024", 1, remote, Path("x"))
    assert files[0].local == Path("x/tokenizers/evil.model")
    # frontier.env and 2135.env look for the data where the download puts them
    for name in ("frontier", "2135"):
        folder = download_fineweb.dataset_name(download_fineweb.CASEOPS)
        assert Path(variables(name)["DATA_PATH"]).name == folder
