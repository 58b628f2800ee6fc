"""tools/preflight.py, the check of a machine: real runs on a CPU with 1 and 2 ranks, each verdict on
figures of pretended GPUs, and the faults that must be seen. tests/test_h100.py has its CUDA path."""

import copy
import json
import sys

import pytest

from conftest import ROOT, run, variables

sys.path.insert(0, str(ROOT / "tools"))

import preflight
from train_gpt import Hyperparameters

SECTIONS = [
    "machine:",
    "data:",
    "disk:",
    "products:",
    "copies:",
    "collectives:",
    "attention:",
    "mlp:",
    "training:",
    "evaluation:",
]


# ---- Real checks ---------------------------------------------------------------------------------
@pytest.fixture
def check(env, tmp_path):
    """A function: (fault, ranks, changed knobs) -> (the ended process, the report)."""

    def start(fault="none", ranks=1, **changes):
        program = [ROOT / "tests" / "preflight_faults.py", fault]
        done = run(program, env(RUN_ID="mine", **changes), tmp_path, ranks)
        report = tmp_path / "logs" / "check.json"
        return done, json.loads(report.read_text()) if report.exists() else None

    return start


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_that_works(ranks, check, tmp_path):
    """Every section has a line and figures of all ranks, and nothing but the report is left."""
    changes = {"GPTQ_BATCHES": 2, "LATE_QAT": 1, "QAT_THRESHOLD": 0.5, "SHORT_SEQ_PARTS": 2}
    done, report = check(ranks=ranks, CHECKPOINT_EVERY=5, TTT_ENABLED=1, **changes)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    # gloo of torch 2.9 has lines of its own
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert [line.split()[0] for line in lines if line.split()[:1] and line[0] != " "][
        :10
    ] == SECTIONS
    assert report["works"] and not report["errors"] and len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        assert {"machine", "products", "copies", "attention", "mlp", "training"} <= rank.keys()
        assert rank["products"] > 1e6 and rank["attention"]["ms"].keys() == {"flash", "math"}
        kinds = rank["training"]["kinds"]
        assert [(kind["seq_len"], kind["qat"]) for kind in kinds] == [(16, 0), (32, 0), (32, 1)]
        assert sum(kind["share"] for kind in kinds) == pytest.approx(1)
        names = {"roundtrip", "sliding_window", "ttt_sgd"}
        assert rank["evaluation"].keys() == names and all(rank["evaluation"].values())
        assert rank["training"]["gptq_seconds"] > 0 < rank["training"]["read_ms"]
        assert rank["training"]["memory_mib"]["resident"]
        sizes = {name: part["bytes"] for name, part in rank["collectives"].items()}
        assert not sizes if ranks == 1 else sizes["all-gather"] == sizes["reduce-scatter"] > 1000
    assert lines[-2] == "a run would work; logs/check.json has all figures"
    assert "set:      ATTENTION=flash FUSED_MLP=0 MICRO_BATCH_TOKENS=16384" in lines
    assert {path.name for path in tmp_path.rglob("*")} == {"logs", "check.json"}


def test_low_rank_training_is_timed_on_some_documents(check):
    done, report = check(TTT_ENABLED=1, TTT_MODE="lora", TTT_LORA_RANK=2, TTT_LORA_CHUNK=24)
    assert done.returncode == 0, done.stderr
    assert report["ranks"][0]["evaluation"]["ttt_lora"] > 0


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ("disk", "disk of rank 0: logs has 1 MiB of free space, but the run may need"),
        ("nan", "training of rank 0: the mean training loss is nan: lower the learning rates"),
        (
            "memory",
            "CUDA out of memory. Tried to allocate 20.00 GiB; set a lower MICRO_BATCH_TOKENS",
        ),
    ],
)
def test_a_run_that_would_fail_is_an_error(fault, sentence, check):
    done, report = check(fault)
    assert done.returncode == 1 and not report["works"] and "a run would work" not in done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sentence in done.stderr and sentence in report["errors"][0]


def test_a_rank_that_fails_in_a_step_ends_the_check(check):
    done, report = check("died", ranks=2)
    assert done.returncode == 1
    assert "training of rank 1: RuntimeError: an illegal memory access" in done.stderr
    assert not report["works"] and report["ranks"][1]["products"]


def test_a_slow_rank_is_named(check):
    done, report = check("slow", ranks=2)
    assert done.returncode == 0, "the run would work, slowly"
    slow = [line for line in report["slow"] if "copies" not in line]  # which the machine decides
    assert [line.split()[3] for line in slow] == ["multiplies", "computes"]
    assert all(line.startswith("rank 1 ") and line.endswith(" than the others") for line in slow)
    assert f"slow: {slow[0]}" in done.stdout.splitlines()


def test_a_kernel_that_was_asked_for_and_is_missing_is_an_error(check):
    done, report = check(ATTENTION="fa3")
    assert done.returncode == 1 and not report["works"]
    assert done.stderr.startswith("error: ATTENTION=fa3: attention fa3 skipped: it needs a Hopper")


@pytest.mark.parametrize("fault", ["short", "missing", "size"])
def test_data_that_a_run_cannot_use_is_an_error(fault, check, data, tmp_path):
    """A truncated shard, no shards, and a shard that is shorter than its manifest says."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shard = folder / "fineweb_train_000001.bin"
    entry = {"bytes": shard.stat().st_size + 2, "tokens": 9, "sha256": ""}
    tokenizer = {
        "path": "tokenizer.model",
        "sha256": preflight.shards.file_sha256(folder / "tokenizer.model"),
    }
    if fault == "short":
        shard.write_bytes(shard.read_bytes()[:-10])
    if fault == "missing":
        shard.unlink()
        (folder / "fineweb_train_000000.bin").unlink()
    if fault == "size":
        manifest = {"format": 1, "tokenizer": tokenizer, "files": {shard.name: entry}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    done, report = check(DATA_PATH=folder)
    assert done.returncode == 1 and not report["works"]
    found = {
        "short": f"shard {shard} has",
        "missing": "has no fineweb_train_NNNNNN.bin; run data/download_fineweb.py",
        "size": f"{shard} has {entry['bytes'] - 2} bytes, but manifest.json says {entry['bytes']}",
    }
    assert f"error: data of rank 0: {'' if fault != 'missing' else 'DATA_PATH='}" in done.stderr
    assert found[fault] in done.stderr
    assert "products:" in done.stdout, "other sections go on"
    assert "training:" not in done.stdout


# ---- Verdicts on pretended figures ---------------------------------------------------------------
@pytest.fixture
def report():
    """What 8 good H100s would give the defaults. Times of the step and kernels are invented."""
    kinds = [
        {"seq_len": 512, "qat": False, "looping": False, "share": 0.4, "ms": 70.0},
        {"seq_len": 2048, "qat": False, "looping": False, "share": 0.5, "ms": 80.0},
        {"seq_len": 2048, "qat": True, "looping": False, "share": 0.1, "ms": 82.0},
    ]
    rank = {
        "machine": {"device": "NVIDIA H100 80GB HBM3", "host": "node", "memory_mib": 81_090},
        "data": {"shards": 80, "train_tokens": 8_000_000_000, "val_tokens": 62_021_846},
        "disk": {"free_bytes": 10**12},
        "products": 720e12,
        "copies": 2.9e12,
        "collectives": {
            name: {"ms": 0.5, "bytes": 10**8} for name in ("reduce-scatter", "all-gather")
        },
        "attention": {"ms": {"fa3": 2.1, "cudnn": 2.6, "flash": 4.0}, "refused": {}},
        "mlp": {"ms": {"plain": 5.0, "fused": 4.4}, "refused": {}},
        "training": {
            "kinds": kinds,
            "loss": 6.9,
            "gradients_ms": 70.0,
            "read_ms": 5.0,
            "gptq_seconds": 4.0,
            "memory_mib": {"allocated": 17_000, "reserved": 20_000},
        },
        "evaluation": {"roundtrip": 3.0, "sliding_window": 80.0},
    }
    chosen = {"attention": "fa3", "mlp": "fused", "micro_batch_tokens": 98_304, "rows": 48}
    return {"ranks": [copy.deepcopy(rank) for _ in range(8)], "chosen": chosen, "errors": []}


def judge(report: dict, **knobs) -> dict:
    return preflight.judge(Hyperparameters.from_env({k: str(v) for k, v in knobs.items()}), report)


def test_a_good_machine_has_an_expectation_and_a_line_to_paste(report, capsys):
    found = judge(report)
    assert found["works"] and found["slow"] == found["advice"] == []
    # (600 - 4) s: 0.4 of them at 70 ms, 0.5 at 80 and 0.1 at 82
    steps = int(596 * (0.4 / 0.070 + 0.5 / 0.080 + 0.1 / 0.082))
    assert found["expected"]["steps"] == steps
    assert found["expected"]["train_seconds"] == 600
    assert found["expected"]["evaluation_seconds"] == 83
    assert found["expected"]["epochs"] == pytest.approx(steps * 786_432 / 8e9)
    assert found["paste"] == "ATTENTION=fa3 FUSED_MLP=1 MICRO_BATCH_TOKENS=98304"
    assert found["bound"] == ("defaults", 44.36)
    preflight.print_verdict(found)
    printed = capsys.readouterr().out
    assert f"expected: {steps:,} steps in 600 s of training" in printed
    assert "step:     80.0 ms, 1.80 times the modelled bound of defaults, 44.36 ms" in printed


def test_a_run_that_its_steps_end(report):
    found = judge(report, ITERATIONS=1000, WARMDOWN_FRAC=0.4)["expected"]
    seconds = 1000 * (0.4 * 0.070 + 0.5 * 0.080 + 0.1 * 0.082)
    assert found["steps"] == 1000 and found["train_seconds"] == pytest.approx(seconds + 4)
    found = judge(report, MAX_WALLCLOCK_SECONDS=0)["expected"]
    assert found["steps"] == 9000


def test_configurations_have_their_bounds(report):
    assert judge(report)["bound"][0] == "defaults"
    assert judge(report, SEED=5)["bound"][0] == "defaults"
    assert judge(report, NUM_LAYERS=12)["bound"] is None
    for name in preflight.BOUNDS.keys() - {"defaults"}:
        assert judge(report, **variables(name))["bound"][0] == name
    report["ranks"] = report["ranks"][:4]
    assert judge(report)["bound"] is None


def change(report: dict, value: object, *path: str, ranks=range(8)) -> None:
    for rank in ranks:
        place = report["ranks"][rank]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value


@pytest.mark.parametrize(
    "value, path, ranks, sentence",
    [
        (634e12, ["products"], [5], "rank 5 (node) multiplies 12% slower than the others"),
        (2.6e12, ["copies"], [0], "rank 0 (node) copies 10% slower than the others"),
        (80.0, ["training", "gradients_ms"], [7], "rank 7 (node) computes gradients 12% slower"),
        (600e12, ["products"], range(8), "large products reach 600 TFLOP/s; 791 is usual"),
        (2.2e12, ["copies"], range(8), "copies reach 2,200 GB/s; 3,015 is usual"),
        ({"flash": 4.0}, ["attention", "ms"], range(8), "FlashAttention 3 is missing: attention"),
        (78_000, ["training", "memory_mib", "reserved"], range(8), "MICRO_BATCH_TOKENS=49152"),
        (
            13.0,
            ["collectives", "all-gather", "ms"],
            range(8),
            "collectives take 13.5 ms, over 15 %",
        ),
        (81.0, ["training", "read_ms"], [3], "reading a batch takes 81 ms, longer than a step"),
        (700.0, ["evaluation", "sliding_window"], range(8), "evaluation takes 703 s, over"),
    ],
)
def test_what_is_slow_is_said(value, path, ranks, sentence, report):
    change(report, value, *path, ranks=ranks)
    found = judge(report)
    assert len(found["slow"]) == 1 and sentence in found["slow"][0]
    assert found["works"], "slow is not broken"


def test_a_slow_step_is_compared_with_the_published_one(report):
    kinds = report["ranks"][0]["training"]["kinds"]
    kinds[1]["ms"] = 81.87 * 790 / 720  # #399's part of products that are 0.91 as fast
    assert judge(report)["slow"] == []
    kinds[1]["ms"] /= 0.84
    (sentence,) = judge(report)["slow"]
    assert "a step reaches 0.29 of the speed of large products" in sentence
    assert "#399's published step on 8 x H100 reached 0.35" in sentence


def test_missing_flash_attention_is_priced_by_its_published_speed(report):
    """Forward 371 and backward 422 TFLOP/s, of 48 x 8 heads x 2,048 x 2,048 / 2 x 64 x 4 FLOP."""
    forward = 4 * 48 * 8 * 2048 * 2048 / 2 * 64
    published = 1000 * (forward / 371e12 + 2.5 * forward / 422e12)
    change(report, {"flash": 1.9 * published, "cudnn": 2.2 * published}, "attention", "ms")
    (sentence,) = judge(report)["slow"]
    assert "attention takes 1.9 times as long" in sentence
    change(report, "NVIDIA A100-SXM4-80GB", "machine", "device")
    assert not any("FlashAttention" in sentence for sentence in judge(report)["slow"])


@pytest.mark.parametrize(
    "knobs, tokens, sentence",
    [
        ({}, 10**9, "the run reads the data 6"),
        ({"MAX_WALLCLOCK_SECONDS": 300}, 8 * 10**9, "set WARMDOWN_FRAC=0.41"),
        ({"MAX_WALLCLOCK_SECONDS": 300, "WARMDOWN_FRAC": 0.41}, 8 * 10**9, ""),
    ],
)
def test_advice(knobs, tokens, sentence, report):
    change(report, tokens, "data", "train_tokens", ranks=[0])
    found = judge(report, **knobs)["advice"]
    assert len(found) == bool(sentence) and all(sentence in line for line in found)


def test_an_error_of_any_rank_means_that_a_run_would_not_work(report):
    report["errors"] = ["disk of rank 3: full"]
    assert not judge(report)["works"]
    report["errors"] = []
    for rank in report["ranks"]:
        del rank["evaluation"]
    assert not judge(report)["works"] and "expected" not in judge(report)


def test_ranks_that_differ_are_shown_from_the_lowest_to_the_highest():
    assert preflight.spread([700.0, 712.0, 690.0]) == "690 to 712"
    assert preflight.spread([700.0, 703.0]) == "703"
