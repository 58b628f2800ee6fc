"""bench/: what its programs compute beside times."""

import argparse
import collections
import importlib.util
import json
import sys
import types

import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

import common
import flops
import h100
import scaling
import train_gpt
from conftest import ROOT, TINY, assert_mistake, run, user_error
from train_gpt import Hyperparameters


def test_flops_of_the_record():
    """228.49 MFLOP per token, forward and backward, counted by hand for the published shape."""
    assert abs(flops.flops_per_token(Hyperparameters(), 2048) / 1e6 - 228.49) < 0.01


@pytest.mark.parametrize("visits", [1, 3])
def test_flops_of_a_window(visits):
    """Of which all positions are scored, or some, or with a band."""
    hp = Hyperparameters(loop_visits=visits)
    whole = flops.window_flops(hp, 2048, 2048)
    assert whole == pytest.approx(2048 * flops.flops_per_token(hp, 2048) / 3)
    assert 0.8 * whole < flops.window_flops(hp, 2048, 64) < whole
    assert flops.window_flops(hp, 2048, 64, band=2048) == flops.window_flops(hp, 2048, 64)
    # A triangle of scores and of weighted values
    saved = whole - flops.window_flops(hp, 2048, 2048, band=512)
    assert saved == 2 * len(hp.layer_order()) * 2 * hp.model_dim * sum(range(2048 - 512 + 1))


def test_the_model_of_a_collective():
    """A ring, and trees within a node and over nodes with all ranks of each or one."""
    machine = scaling.Machine(0.0, 1.0, 0.0, 8, (2.0, 5.0), (20.0, 4.0), tree=True)
    ring = machine._replace(tree=False)
    assert scaling.Call("all_reduce", "all", tuple(range(4)), 40).seconds(ring) == 2 * (
        2 * 3 + 40 * 3 / 4 / 20
    )
    assert (
        scaling.Call("all_gather", "all", tuple(range(8)), 40).seconds(machine)
        == 2 * 3 + 40 * 7 / 8 / 20
    )
    over = scaling.Call("all_gather", "all", tuple(range(16)), 40)
    # Eight cards are faster than the links of the node
    assert over.seconds(machine) == 2 * 3 + 5 + 40 * 15 / 16 / 20
    assert over.seconds(machine._replace(beta=(20.0, 1.0))) == 2 * 3 + 5 + 40 * 15 / 16 / 8
    assert scaling.Call("all_reduce", "replicate", (1, 9), 40).seconds(machine) == 2 * (
        5 + 40 / 2 / 4
    )


def totals(step):
    """Bytes of the buffers by kind and group."""
    sums = collections.Counter()
    for call in step.calls:
        sums[call.kind, call.group] += call.nbytes
    return dict(sums)


MATRICES = (
    512 * 512 + 256 * 512 + 1536 * 512
)  # weights in a row of each of the record's three banks, which have 22 rows
# Bytes of the gradients outside the banks, the squared norm of the others and the report, in fp32
SMALL = 4 * (26_829_913 - 22 * MATRICES + 1 + 3)


@pytest.mark.parametrize("ranks, rows", [(8, 24), (64, 64), (1024, 1024)])
def test_bytes_of_one_shard_group(ranks, rows):
    """Banks are padded to a multiple of the ranks, so traffic grows with them."""
    step = scaling.count(Hyperparameters(), ranks, ranks)
    gathered = 2 * rows * MATRICES
    expected = {("all_reduce", "all"): SMALL, ("reduce_scatter", "all"): 2 * rows * MATRICES}
    assert totals(step) == expected | {("all_gather", "all"): gathered}
    sent = (ranks - 1) / ranks * (2 * SMALL + 2 * rows * MATRICES + gathered)
    assert sum(call.sent for call in step.calls) == pytest.approx(sent)


@pytest.mark.parametrize("ranks, rank", [(16, 9), (1024, 0), (1024, 1023)])
def test_bytes_of_hybrid_sharding(ranks, rank):
    """Within a node as on one node; between nodes an eighth of each bank, and the small gradients.
    Every rank sends as many."""
    step = scaling.count(Hyperparameters(), ranks, 8, rank=rank)
    bank = 2 * 24 * MATRICES
    expected = {("all_reduce", "all"): SMALL, ("reduce_scatter", "shard"): bank}
    assert totals(step) == expected | {
        ("all_reduce", "replicate"): bank / 8,
        ("all_gather", "shard"): bank,
    }
    node = tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
    members = dict(all=tuple(range(ranks)), shard=node, replicate=tuple(range(rank % 8, ranks, 8)))
    assert {call.group: call.ranks for call in step.calls} == members


def test_bytes_of_ddp():
    """Every rank gets the sum of all gradients, without padding, and updates all rows."""
    step = scaling.count(Hyperparameters(), 16, 1)
    assert totals(step) == {("all_reduce", "all"): SMALL + 2 * 22 * MATRICES}
    assert all(rows == 22 for rows, *_ in step.owned)


def test_ranks_that_cannot_share_a_batch(data):
    """The model leaves out the ranks that the loader refuses."""
    hp = Hyperparameters.from_env(
        {"DATA_PATH": str(data), **{name: str(value) for name, value in TINY.items()}}
    )
    assert [scaling.sequences(hp, ranks) for ranks in (1, 8, 24)] == [24, 3, 1]
    for ranks in (16, 48):  # 1.5 and 0.5 sequences per rank
        assert scaling.sequences(hp, ranks) == 0
        runtime = types.SimpleNamespace(
            comm=train_gpt.Comm(0, ranks), device=torch.device("cpu"), attention="flash"
        )
        with user_error(f"so {ranks} ranks cannot share its sequences evenly"):
            train_gpt.TrainingLoader(hp, runtime)


def test_curves_are_printed_and_drawn(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scaling, "WORLDS", [1, 16])
    monkeypatch.setattr(
        sys, "argv", ["scaling.py", "--plot", str(tmp_path / "s.png"), "--network", "1.6"]
    )
    scaling.main()
    out = capsys.readouterr().out
    assert "between nodes 20 us and 1.6 GB/s" in out
    assert (tmp_path / "s.png").stat().st_size > 10_000
    found = json.loads(out.splitlines()[-1])["modelled"]
    assert [row["ranks"] for row in found["weak"]] == [1, 16]
    assert [(row["ranks"], row["tokens"]) for row in found["fixed"]] == [
        (1, 786_432),
        (16, 49_152),
        (384, 2048),
    ]


@pytest.mark.parametrize("program", ["step", "eval"])
def test_another_version_of_the_script_is_compared(program, tmp_path):
    """Here the other version is a copy of this one, so both evaluations give the same loss."""
    (tmp_path / "other.py").write_bytes((ROOT / "train_gpt.py").read_bytes())
    knobs = {name: str(value) for name, value in TINY.items()}
    options = [
        "--against",
        tmp_path / "other.py",
        "--rounds",
        2,
        *(["--windows", 8] if program == "eval" else []),
    ]
    result = run([ROOT / "bench" / f"{program}.py", *options], knobs, tmp_path)
    assert result.returncode == 0, result.stderr
    other, this = json.loads(result.stdout.splitlines()[-1])["against"]
    assert (other["variant"], other["ratio"]) == (str(tmp_path / "other.py"), 1.0)
    assert this["median_ms"] > 0 and this["ratio"] > 0
    assert this.get("nats") == other.get("nats")


def test_what_is_not_another_version_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "empty.py").write_text("")
    for name, part in (
        ("broken.py", "cannot be imported"),
        ("none.py", "is not a Python file"),
        ("empty.py", "has no Hyperparameters: give another version"),
    ):
        command = [ROOT / "bench" / "step.py", "--against", tmp_path / name]
        assert_mistake(command, tmp_path, part)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_numbers_of_rounds_are_positive(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number above 0"):
        common.positive(text)
    assert common.positive("3") == 3
    programs = [path.read_text() for path in (ROOT / "bench").glob("*.py")]
    options = [
        line for program in programs for line in program.splitlines() if '"--rounds"' in line
    ]
    assert len(options) == 4 and all("type=positive" in line for line in options)


@pytest.fixture(scope="module")
def tracer():
    """bench/pretended_h100/trace.py, which runs under the pretended driver."""
    path = ROOT / "bench" / "pretended_h100" / "trace.py"
    specification = importlib.util.spec_from_file_location("pretended_trace", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_slice_counts_as_a_slice(tracer):
    """Reads of 1,000 rows of 96: a third of each, overlapping parts, all, all by one row."""
    row, column = sympy.symbols("row column", integer=True)

    def read(index, *sizes):
        return MemoryDep("buffer", index, (row, column), tuple(map(sympy.Integer, sizes)))

    third = read(96 * row + Identity(column) + 32, 1000, 32)
    assert tracer.footprint([third], 96_000) == 32_000
    assert tracer.footprint([third, read(96 * row + column + 48, 1000, 32)], 96_000) == 48_000
    assert tracer.footprint([third, read(96 * row + column, 1000, 96)], 96_000) == 96_000
    assert tracer.footprint([read(column, 1000, 96)], 96_000) == 96
    # One loop over the first two heads of 16 of every row.
    head = read(96 * FloorDiv(row, 2) + 16 * ModularIndexing(row, 1, 2) + column, 2000, 16)
    assert tracer.footprint([head, third], 96_000) == 32_000 + 32_000
    # Not affine: the whole buffer
    assert tracer.footprint([read(sympy.Mod(row, 7), 1000, 96)], 96_000) == 96_000


def test_costs_of_a_log():
    """A kernel or product costs the larger of bytes and operations, attention its formula."""
    log = [
        "note\tpart\tforward",
        "note\tkernel\t0",
        "triton\ttriton_poi_fused_mul_3\t40\t8",
        "product\t4096\t4096\t4096\t1\t14,14,14",
        "note\tattention\tforward\t2\t1024\t8\t64\t1024\t4\t0",
        "note\tattention\tforward\t2\t1000\t8\t64\t1024\t4\t16",
        "note\tpart\tbackward",
        "copy\td2d\t1000",
        "copy\th2d\t1000",
    ]
    kernels = [
        dict(name="triton_poi_fused_mul_3", bytes=3.35e9, flops=1.58e12, sizes="{'x': 1024}")
    ]
    found = dict(
        facts={"peak_mib": 7, "graph_breaks": 0, "torch": "2.9.1"}, kernels=kernels, log=log
    )
    launches = h100.launches_of(found)
    kernel, product, attention, banded, inside, outside = launches
    assert kernel["name"] == "poi_fused_mul x:1024" and h100.seconds(kernel) == pytest.approx(2e-3)
    assert h100.seconds(product) == pytest.approx(2 * 4096**3 / h100.FLOPS)
    assert banded["flops"] == 4 * 2 * 8 * 1000 * 16 * 64
    assert banded["bytes"] == 4 * 2 * 64 * (1000 * 8 + 1024 * 4)
    assert attention["flops"] == 2 * 2 * 8 * 1024**2 * 64
    assert attention["bytes"] == 2 * 2 * 1024 * 64 * (16 + 8)
    assert (inside["part"], inside["bytes"], outside["bytes"]) == ("backward", 2000, 1000)
    assert h100.seconds(outside) == pytest.approx(1000 / h100.HOST_LINK)
    result = h100.totals(found, launches)
    assert result["launches"] == 6 and result["spilled_kernels"] == 1
    assert result["triton_gb"] == 3.35
    assert result["step_ms"] == pytest.approx(1e3 * sum(map(h100.seconds, launches)), abs=1e-3)


def test_the_model_of_a_gpu_refuses_what_is_no_knob():
    with user_error("'LAYERS' is not KNOB=VALUE"):
        h100.parse_knobs(["NUM_LAYERS=3", "LAYERS"])
