"""MICRO_BATCH_TOKENS=0: a first step that does not fit in memory halves the micro-batch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from conftest import user_error


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


ROWS = {"TRAIN_BATCH_TOKENS": 256, "GPTQ_BATCHES": 1}  # 8 rows on this rank


@pytest.fixture
def gpu(one_rank, monkeypatch):
    """A function of (rows that fit, knobs): what a GPU tries, the log, and a call of `make_run`."""

    def make(rows: int, **changes):
        hp, runtime = one_rank(TRAIN_BATCH_TOKENS=256, **changes)
        micro = hp.micro_batch_tokens or train_gpt.MICRO_BATCH["cuda"]
        device = torch.device("cuda")
        runtime = dataclasses.replace(runtime, device=device, micro_batch_tokens=micro)
        tried, log = [], []

        def pretended(hp, runtime, log, val):
            accumulation = train_gpt.micro_batches(hp, 8, runtime.micro_batch_tokens)
            tried.append(8 // accumulation)
            loader = SimpleNamespace(rows=8, close=lambda: None)
            fits = lambda: 8 // accumulation <= rows  # noqa: E731
            parts = dict(loader=loader, accumulation=accumulation, fits=fits, runtime=runtime)
            return SimpleNamespace(**parts)

        monkeypatch.setattr(train_gpt, "Run", pretended)
        return tried, log, lambda: train_gpt.make_run(hp, runtime, log.append, None)

    return make


@pytest.mark.parametrize("rows, expected", [(8, [8]), (5, [8, 4]), (1, [8, 4, 2, 1])])
def test_the_micro_batch_is_halved_until_it_fits(rows, expected, gpu):
    tried, log, make = gpu(rows)
    run = make()
    assert tried == expected and run.accumulation == 8 // expected[-1]
    assert len(log) == len(expected) - 1
    for number, line in zip(expected, log, strict=False):
        assert f"note: a micro-batch of {32 * number} tokens does not fit" in line
    tried, _, make = gpu(0)
    with user_error("of 32 tokens does not fit .* TRAIN_SEQ_LEN"):
        make()
    assert tried == [8, 4, 2, 1]


def test_a_micro_batch_that_was_asked_for_is_not_changed(gpu):
    """The run ends with the error of main instead."""
    tried, log, make = gpu(1, MICRO_BATCH_TOKENS=128)
    assert make().accumulation == 2 and tried == [4] and not log


@pytest.mark.parametrize("micro_batch", [0, 64])
def test_a_step_that_fits_leaves_no_gradients(micro_batch, run_of):
    """Otherwise they would be in the first step of a run without warm-up."""
    run = run_of(**ROWS, MICRO_BATCH_TOKENS=micro_batch)
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    assert run.fits()
    optimizer = run.optimizer
    assert not optimizer.flat.any()
    assert not any(shard.grad.any() or shard.grad_sum.any() for shard in optimizer.banks.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in run.tensors().items())


@pytest.mark.parametrize("part", ["backward", "calibration", "other rank"])
def test_memory_that_is_full_on_any_rank_is_seen_on_all(part, run_of, monkeypatch):
    """In the gradients, or in calibration, which is not compiled."""
    run = run_of(**ROWS)
    if part == "other rank":
        monkeypatch.setattr(run.runtime.comm, "gather", lambda mine: [mine, True])
    elif part == "calibration":
        monkeypatch.setattr(train_gpt.Calibration, "add", full)
    else:
        setattr(run, part, full)
    assert not run.fits()


def test_the_kind_of_step_that_needs_most_memory_is_tried(run_of, monkeypatch):
    run = run_of(**ROWS, NUM_LAYERS=4, LOOP_VISITS=2, LOOP_FIRST=1, LOOP_LAYERS=2, LATE_QAT=1)
    seen = []
    monkeypatch.setattr(run, "backward", lambda batch, kind: seen.append(kind))
    assert run.fits()
    assert [(kind.looping, kind.qat) for kind in seen] == [(True, True)]
