"""tools/check_machine.py, the check of a machine: real runs on a CPU with 1 and 2 ranks, each verdict on
figures of pretended GPUs, and the faults that must be seen. tests/test_h100.py has its CUDA path."""

import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import check_machine
import train_gpt
from conftest import ROOT, run
from train_gpt import Hyperparameters

SECTIONS = ["machine", "data", "disk", "products", "copies", "collectives"]
SECTIONS += ["attention", "mlp", "training", "evaluation"]


# ---- Real checks ---------------------------------------------------------------------------------
SCRIPT = f"""
import os, sys, time
from unittest.mock import Mock
sys.path[:0] = {[str(ROOT), str(ROOT / "tools")]}
import torch, check_machine, program
from train_gpt import Run
rank, step, backward = int(os.environ.get("RANK", 0)), Run.train_step, Run.backward
{{}}
program.run_program(check_machine.main)
"""
NAN = "Run.train_step = lambda *given: step(*given) * float('nan')"
LARGE = "Run.train_step = Mock(side_effect=torch.OutOfMemoryError('Tried to allocate 20.00 GiB'))"
DIES = "if rank: Run.train_step = Mock(side_effect=RuntimeError('an illegal memory access'))"
SLOW = """
check_machine.STEPS, speed = 2, check_machine.product_speed
check_machine.product_speed = lambda runtime: speed(runtime) / 2 if rank else 1e3
Run.backward = lambda *given: (backward(*given), time.sleep(0.2 * rank))
"""


@pytest.fixture
def check(env, tmp_path):
    """A function: (fault, ranks, exit status, changed knobs) -> (the ended process, the report)."""

    def start(fault="", ranks=1, status=0, **changes):
        (tmp_path / "check.py").write_text(SCRIPT.format(fault))
        (folder := tmp_path / "run").mkdir(exist_ok=True)
        knobs = env(RUN_ID="mine", **changes)
        done = run([tmp_path / "check.py"], knobs, folder, ranks, status=status)
        report = folder / "logs" / "check.json"
        return done, json.loads(report.read_text()) if report.exists() else None

    return start


@pytest.mark.parametrize("ranks, mode", [(1, "lora"), (2, "sgd")])
def test_a_machine_that_works(ranks, mode, check, tmp_path):
    """Every section has a line and figures of all ranks, and nothing but the report is left."""
    changes = dict(MAX_WALLCLOCK_SECONDS=60, GPTQ_BATCHES=2, SHORT_SEQ_PARTS=2, CHECKPOINT_EVERY=5)
    changes |= dict(LATE_QAT=1, QAT_THRESHOLD=0.5, TTT_ENABLED=1, TTT_MODE=mode, TTT_LORA_CHUNK=24)
    done, report = check(ranks=ranks, **changes)
    assert not done.stderr, done.stderr
    # gloo of torch 2.9 has lines of its own
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    firsts = [line.partition(":")[0] for line in lines if line and line[0] != " "]
    assert firsts[: len(SECTIONS)] == SECTIONS
    assert report["works"] and not report["errors"] and len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        assert rank["products"]["TFLOP/s"] > 1e-6 < rank["copies"]["GB/s"]
        assert rank["attention"]["ms"].keys() == {"sdpa", "math"}
        training, seconds = rank["training"], rank["evaluation"]["seconds"]
        assert list(training["kinds"]) == ["T=16", "T=32", "T=32 QAT"]
        assert sum(kind["share"] for kind in training["kinds"].values()) == pytest.approx(1)
        assert training["calibration_seconds"] > 0 < training["read_ms"]
        assert "memory_mib" not in training, "no GPU"
        assert seconds.keys() == {"roundtrip", "sliding_window", f"ttt_{mode}"}
        assert all(seconds.values())
        sizes = {name: part["bytes"] for name, part in rank["collectives"].items()}
        assert not sizes if ranks == 1 else sizes["all-gather"] == sizes["reduce-scatter"] > 1000
    assert lines[-2] == "ready to run; logs/check.json has all figures"
    (line,) = [line for line in lines if line.startswith("set: ")]
    assert re.fullmatch(r"set:      ATTENTION=(sdpa|math) FUSED_MLP=0 ITERATIONS=\d+", line)
    assert report["finished"] and report["knobs"]["run_id"] == "mine"
    assert {path.name for path in (tmp_path / "run").rglob("*")} == {"logs", "check.json"}


@pytest.mark.parametrize(
    "fault, changes, sentence",
    [
        (NAN, {}, "training of rank 0: the mean training loss is nan: lower the learning rates"),
        (LARGE, {}, "Tried to allocate 20.00 GiB; set a lower MICRO_BATCH_TOKENS"),
        (LARGE, {"ranks": 2}, "20.00 GiB; set a lower MICRO_BATCH_TOKENS"),
        (DIES, {"ranks": 2}, "training of rank 1: RuntimeError: an illegal memory access"),
        ("", {"MAX_WALLCLOCK_SECONDS": 0.001, "GPTQ_BATCHES": 4}, "=0.001 is less than the"),
        ("", {"ranks": 2, "TRAIN_BATCH_TOKENS": 800}, "TOKENS=800 is not a multiple of"),
        ("", {"ATTENTION": "fa3"}, "attention fa3 skipped: it needs a Hopper GPU"),
    ],
)
def test_a_run_that_would_fail_is_an_error(fault, changes, sentence, check):
    done, report = check(fault, status=1, **changes)
    assert not report["works"] and "ready to run" not in done.stdout
    assert sentence in done.stderr and report["errors"]
    if "ranks" in changes:  # the launcher prints more
        assert not report["finished"] and report["ranks"][1]["products"]
    else:
        assert sentence in report["errors"][0]
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_report_of_a_rank_0_that_is_killed_says_so(tmp_path, monkeypatch):
    """As torchrun does when another rank fails, whatever rank 0 does then."""
    monkeypatch.setattr(check_machine, "REPORT", tmp_path / "check.json")
    report = check_machine.unfinished() | {"ranks": [{"products": 1}]}
    full = {"errors": ["disk of rank 0: full"]}
    for more, added in (
        ({}, {"errors": ["the check did not finish"]}),
        (full, full),
        ({"finished": True, "works": True}, {}),
    ):
        check_machine.save(report | more)
        assert json.loads(check_machine.REPORT.read_text()) == report | more | added


def test_data_that_a_run_cannot_use_is_an_error(check, data, tmp_path):
    """A truncated shard, and one that is shorter than its manifest says."""
    folder = shutil.copytree(data, tmp_path / "folder")
    shard, size = (path := folder / "fineweb_train_000001.bin"), path.stat().st_size
    own = train_gpt.sha256_of(folder / "tokenizer.model")
    entries = {shard.name: {"bytes": size + 2, "tokens": 9, "sha256": ""}}
    tokenizer = {"path": "tokenizer.model", "sha256": own}
    check_machine.shards.write_manifest(folder, tokenizer=tokenizer, files=entries)
    done, report = check(DATA_PATH=folder, status=1)
    assert f"error: data of rank 0: {shard} has {size} bytes, but" in done.stderr
    assert "products:" in done.stdout, "other sections go on"
    assert "training:" not in done.stdout and not report["works"]
    shard.write_bytes(shard.read_bytes()[:-10])
    (folder / "manifest.json").unlink()
    done, _ = check(DATA_PATH=folder, status=1)
    assert f"error: data of rank 0: shard {shard} has" in done.stderr


def test_a_slow_rank_is_named(check):
    done, report = check(SLOW, ranks=2)  # the run would work, slowly
    slow = [line for line in report["slow"] if "copies" not in line]  # which the machine decides
    assert [line.split()[3] for line in slow] == ["multiplies", "computes"]
    assert all(line.startswith("rank 1 ") and line.endswith(" than the others") for line in slow)
    assert f"slow: {slow[0]}" in done.stdout.splitlines()


# ---- Verdicts on pretended figures ---------------------------------------------------------------
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def report():
    """What 8 good H100s would give the defaults. Times of the step and kernels are invented."""
    kinds = {"T=512": {"share": 0.4, "ms": 70.0}, "T=2048": {"share": 0.5, "ms": 80.0}}
    kinds["T=2048 QAT"] = {"share": 0.1, "ms": 82.0}
    training = dict(kinds=kinds, step_ms=80.0, gradients_ms=70.0, read_ms=5.0)
    rank = {
        "machine": {"device": H100, "memory_mib": 81_090},
        "data": {"train_tokens": 8_000_000_000},
        "products": {"TFLOP/s": 720.0},
        "copies": {"GB/s": 2900.0},
        "collectives": {"reduce-scatter": {"ms": 0.5}, "all-gather": {"ms": 0.5}},
        "attention": {"ms": {"fa3": 2.1, "cudnn": 2.6, "sdpa": 4.0}, "refused": {}},
        "mlp": {"ms": {"plain": 5.0, "fused": 4.4}, "refused": {}},
        "training": training | {"calibration_seconds": 4.0, "memory_mib": 20_000},
        "evaluation": {"seconds": {"roundtrip": 3.0, "sliding_window": 80.0}},
    }
    chosen = {"attention": "fa3", "mlp": "fused", "micro_batch_tokens": 98_304}
    chosen |= {"dtype": "torch.bfloat16", "compiled": True}
    hosts = [rank["machine"] | {"host": f"node{number}"} for number in range(8)]
    ranks = [copy.deepcopy(rank | {"machine": host}) for host in hosts]
    return {"ranks": ranks, "chosen": chosen, "errors": []}


def judge(report: dict, **knobs) -> dict:
    hp = Hyperparameters.from_env({name: str(value) for name, value in knobs.items()})
    return check_machine.judge(hp, report)


def test_a_good_machine_has_an_expectation_and_a_line_to_paste(report, capsys):
    found = judge(report)
    assert found["works"] and found["slow"] == found["advice"] == []
    # (600 - 4) s: 0.4 of them at 70 ms, 0.5 at 80 and 0.1 at 82
    steps = int(596 * (0.4 / 0.070 + 0.5 / 0.080 + 0.1 / 0.082))
    run = {"steps": steps, "train_seconds": 600, "evaluation_seconds": 83}
    assert found["expected"] == run | {"epochs": pytest.approx(steps * 786_432 / 8e9)}
    assert found["paste"] == "ATTENTION=fa3 FUSED_MLP=1"
    check_machine.print_verdict(found)
    assert f"expected: {steps:,} steps in 600 s of training" in capsys.readouterr().out


def test_a_run_that_its_steps_end(report):
    found = judge(report, ITERATIONS=1000, WARMDOWN_FRAC=0.4)["expected"]
    seconds = 1000 * (0.4 * 0.070 + 0.5 * 0.080 + 0.1 * 0.082)
    assert found["steps"] == 1000 and found["train_seconds"] == pytest.approx(seconds + 4)
    for knobs in ({"MAX_WALLCLOCK_SECONDS": 0}, {"MAX_WALLCLOCK_SECONDS": 700}):
        assert judge(report, ITERATIONS=9000, **knobs)["expected"]["steps"] == 9000
    # Time ends the run before its last step, and the sum over kinds says over 200,000 steps
    kinds = report["ranks"][0]["training"]["kinds"]
    kinds["T=512"]["ms"], kinds["T=2048"]["ms"] = 1.0, 200.0
    assert judge(report, ITERATIONS=6000)["expected"]["steps"] == 6000


def change(report: dict, path: str, value: object, ranks=range(8)) -> None:
    for rank in ranks:
        *sections, name = path.split()
        functools.reduce(dict.get, sections, report["ranks"][rank])[name] = value


@pytest.mark.parametrize(
    "path, value, ranks, sentence",
    [
        ("products TFLOP/s", 634.0, [5], "rank 5 (node5) multiplies 12% slower than the others"),
        ("products TFLOP/s", 660.0, [5], "rank 5 (node5) multiplies 8% slower than the others"),
        ("products TFLOP/s", 668.0, [5], ""),  # 7 %
        ("copies GB/s", 2600.0, [0], "rank 0 (node0) copies 10% slower than the others"),
        ("training gradients_ms", 80.0, [7], "rank 7 (node7) computes gradients 12% slower"),
        ("products TFLOP/s", 490.0, range(8), "products reach 490 TFLOP/s; 593 is usual"),
        ("products TFLOP/s", 586.0, range(8), ""),  # measured on a healthy H100
        ("copies GB/s", 2200.0, range(8), "copies reach 2,200 GB/s; 3,015 is usual"),
        ("training memory_mib", 78_000, [6], "training reserves 78,000 of 81,090"),
        ("collectives all-gather ms", 13.0, range(8), "collectives take 13.5 ms, over"),
        ("training read_ms", 81.0, [3], "reading a batch takes 81 ms, longer than a step"),
        ("evaluation seconds sliding_window", 700.0, [4], "evaluation takes 703 s, over"),
    ],
)
def test_what_is_slow_is_said(path, value, ranks, sentence, report):
    change(report, path, value, ranks)
    found = judge(report)
    assert len(found["slow"]) == bool(sentence) and all(sentence in line for line in found["slow"])
    assert found["works"], "slow is not broken"


def test_two_ranks_are_compared_with_each_other_but_not_on_cpus(report):
    """Which others use as well."""
    change(report, "products TFLOP/s", 648.0, [1])
    two = report | {"ranks": report["ranks"][:2]}
    assert judge(two)["slow"] == ["rank 1 (node1) multiplies 10% slower than the others"]
    for rank in report["ranks"]:
        del rank["machine"]["memory_mib"]
    change(report, "products TFLOP/s", 580.0, [1])  # 19 %
    assert judge(report)["slow"] == []


def test_other_data_types_and_parts_of_a_gpu_have_no_usual_speed(report):
    change(report, "products TFLOP/s", 60.0)
    for dtype, device in (("torch.float32", H100), ("torch.bfloat16", f"{H100} MIG 1g.10gb")):
        report["chosen"]["dtype"] = dtype
        change(report, "machine device", device)
        assert judge(report)["slow"] == []
    peaks = {"NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA A100 80GB PCIe": 1.935e12}
    peaks |= {"NVIDIA A100-SXM4-40GB": 1.555e12, "NVIDIA H100 PCIe": 2.0e12}
    peaks |= {"NVIDIA GH200 480GB": 4.0e12, "NVIDIA GeForce RTX 4090 Laptop GPU": None}
    for name, peak in peaks.items():
        assert check_machine.flops.of_gpu(name, check_machine.flops.BANDWIDTH) == peak


def test_the_line_to_paste_has_what_is_advised(report):
    change(report, "training memory_mib", 78_000)
    change(report, "evaluation seconds sliding_window", 700.0)
    change(report, "mlp ms", {"plain": 4.0, "fused": 4.4})
    knobs = "MICRO_BATCH_TOKENS=49152 EVAL_MODE=banded WARMDOWN_FRAC=0.41"
    assert judge(report, MAX_WALLCLOCK_SECONDS=300)["paste"] == f"ATTENTION=fa3 FUSED_MLP=0 {knobs}"
    change(report, "attention ms", {"fa3": 9.0, "sdpa": 5.0}, [0])
    change(report, "attention ms", {"fa3": 9.0, "sdpa": 19.0}, [1])
    assert judge(report)["paste"].startswith("ATTENTION=fa3 "), "a step waits for the slowest rank"
    for sdpa, advised in ((2.09, "fa3"), (2.04, "sdpa")):  # from 2 % on
        change(report, "attention ms", {"fa3": 2.1, "sdpa": sdpa})
        assert judge(report)["paste"].startswith(f"ATTENTION={advised} ")
    steps = int(re.search(r"ITERATIONS=(\d+)", judge(report, ITERATIONS=6000)["paste"])[1])
    assert judge(report, ITERATIONS=steps)["expected"]["train_seconds"] == 600
    found = judge(report, TTT_ENABLED=1)
    assert "EVAL_MAX_SECONDS=540" in found["paste"] and "EVAL_MODE" not in found["paste"]


NO_FA3 = {"attention refused": {"fa3": "No module named 'x'"}}


@pytest.mark.parametrize(
    "changes, knobs, sentence",
    [
        (NO_FA3, {}, "no FlashAttention 3 (No module named 'x'): pip install"),
        ({**NO_FA3, "machine device": "NVIDIA A100-SXM4-80GB"}, {}, ""),  # where it cannot run
        ({"data train_tokens": 10**9}, {}, "the run reads the data 6"),
        ({}, {"MAX_WALLCLOCK_SECONDS": 300}, "#399's warmdown is 0.41 of its run"),
        ({}, {"MAX_WALLCLOCK_SECONDS": 300, "WARMDOWN_FRAC": 0.41}, ""),
        ({}, {"ITERATIONS": 6000}, "ITERATIONS=6000 ends the run after 461 of 600 s: set"),
        ({}, {"ITERATIONS": 6000, "MAX_WALLCLOCK_SECONDS": 0}, ""),
    ],
)
def test_advice(changes, knobs, sentence, report):
    for path, value in changes.items():
        change(report, path, value)
    found = judge(report, **knobs)["advice"]
    assert len(found) == bool(sentence) and all(sentence in line for line in found)


def test_an_error_of_any_rank_means_that_a_run_would_not_work(report):
    assert not judge(report | {"errors": ["disk of rank 3: full"]})["works"]
    del report["ranks"][2]["evaluation"]
    assert not judge(report)["works"] and "expected" not in judge(report)


# ---- Measurements --------------------------------------------------------------------------------
def test_kernels_are_timed_at_the_sizes_of_the_run(run_of, monkeypatch):
    """Forward and backward; a kernel that is refused has its reason and no time."""
    hp, runtime = (run := run_of(val=True, MICRO_BATCH_TOKENS=96)).hp, run.runtime
    shapes, real = [], train_gpt.reference_attention

    def attend(q, k, v, band=0, document=None, longest=0):
        shapes.append((tuple(q.shape), tuple(k.shape)))
        return real(q, k, v, band, document)

    why_not = lambda name, *_: "" if name == "math" else "it is missing"  # noqa: E731
    monkeypatch.setattr(train_gpt, "why_not", why_not)
    monkeypatch.setattr(train_gpt, "load_attention", lambda name: attend)
    found = check_machine.attention_times(hp, runtime, ("sdpa", "math"))
    assert found["ms"]["math"] > 0 and found["refused"] == {"sdpa": "it is missing"}
    assert set(shapes) == {((3, 32, 4, 8), (3, 32, 2, 8))}
    assert check_machine.mlp_times(hp, runtime)["ms"].keys() == {"plain"}
    monkeypatch.setattr(train_gpt, "is_hopper", lambda _: True)
    fused = mock.Mock(side_effect=lambda x, *_: x)
    monkeypatch.setattr(train_gpt, "load_fused_mlp", lambda *_: fused)
    found = check_machine.mlp_times(hp, runtime)
    assert found["ms"].keys() == {"plain"} and "to not have been used" in found["refused"]["fused"]
    fused.side_effect = lambda x, scale, up, down: x + (x @ up.mT) @ down.mT
    assert check_machine.mlp_times(hp, runtime)["ms"].keys() == {"plain", "fused"}


def test_evaluations_are_scaled_to_the_whole_text(run_of, monkeypatch):
    """8 timed batches take a second, so each batch of the whole text takes an eighth of it."""
    run = run_of(val=True, MICRO_BATCH_TOKENS=64, VAL_BATCH_SIZE=64)  # two windows of 32
    scored = []
    monkeypatch.setattr(train_gpt.Evaluator, "score", lambda self, w: scored.append(w.shape[1]))
    monkeypatch.setattr(check_machine, "seconds_of", lambda work, runtime: work() or 1.0)
    later = math.ceil((run.val.targets - 32) / 8)
    found = check_machine.evaluation(run)["seconds"]
    assert scored == [2, 16, 2, 16]
    assert found["sliding_window"] == math.ceil(later / 2) / 8
    later = math.ceil(run.val.targets / 32) - 1  # a span's first window is not timed
    assert found["roundtrip"] == math.ceil(later / 2) / 8


def test_time_after_the_limit_of_test_time_training_is_scored_plainly(run_of, monkeypatch):
    monkeypatch.setattr(check_machine, "seconds_of", lambda work, runtime: work() or 10.0)
    monkeypatch.setattr(check_machine, "scoring", lambda run, way: 4.0)
    knobs = {"TTT_ENABLED": 1, "TTT_CHUNK_TOKENS": 128}
    run = run_of(val=True, **knobs)
    whole = 10.0 * run.val.targets / (8 * 128) * 8 / 7
    assert check_machine.evaluation(run)["seconds"]["ttt_sgd"] == pytest.approx(whole)
    run = run_of(val=True, **knobs, EVAL_MAX_SECONDS=whole / 4)
    monkeypatch.setattr(train_gpt, "out_of_time", lambda *_: False)
    limited = check_machine.evaluation(run)["seconds"]["ttt_sgd"]
    assert limited == pytest.approx(whole / 4 + 0.75 * 4.0)


def test_training_leaves_no_gradients_and_knows_the_time_of_gptq(run_of):
    run = run_of(val=True, GPTQ_BATCHES=2, MAX_WALLCLOCK_SECONDS=60)
    found = check_machine.training(run)
    optimizer = run.optimizer
    assert not optimizer.flat.any() and not any(s.grad.any() for s in optimizer.banks.values())
    assert found["calibration_seconds"] == run.clock.reserve > 0


@pytest.mark.parametrize("ranks, shard", [(3, 3), (4, 2)])
def test_collectives_have_the_sizes_of_the_optimizers(ranks, shard, run_of, monkeypatch):
    """As one of 3 ranks, and as one of two nodes with 2 ranks each."""
    calls = []

    def start(comm, collective, out, *source):
        calls.append((collective.__name__, max(t.nbytes for t in (out, *source))))
        return lambda: None

    run = run_of(val=True)
    comm = train_gpt.Comm(0, ranks)
    comm.shard, comm.replicate = train_gpt.Comm(0, shard), train_gpt.Comm(0, ranks // shard)
    monkeypatch.setattr(train_gpt.Comm, "start", start)
    runtime = dataclasses.replace(run.runtime, comm=comm)
    found = check_machine.communication(run.hp, runtime)
    each = 3 + 3 + 1 + 3 * (shard != ranks)
    assert len(calls) == (2 + 15) * each, "as often on every rank, whatever its time"
    model = train_gpt.GPT(run.hp, None, runtime.dtype)
    optimizer = train_gpt.ParallelMuon(model, model.initialise(0), run.hp, comm)
    padded = sum(shard.padded.nbytes for shard in optimizer.banks.values())
    assert found["reduce-scatter"]["bytes"] == found["all-gather"]["bytes"] == padded
    assert found["all-reduce"]["bytes"] == optimizer.flat.nbytes
    assert ("all-reduce of rows" in found) == (shard != ranks)


def test_facts_of_a_gpu(tmp_path, monkeypatch):
    """Those that nvidia-smi tells of the card that torch uses."""
    card = mock.Mock(uuid="12ab-34", total_memory=1 << 36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runtime = SimpleNamespace(device=torch.device("cuda"), device_name=lambda: H100)
    for script, told in (
        ('case "$*" in *--id=GPU-12ab-34*) echo "570, 700 W";; esac', "570, 700 W"),
        ("exit 9", "unknown"),
        ("echo; exit 0", "unknown"),
    ):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert check_machine.machine(runtime)["driver, power limit, clock"] == told
