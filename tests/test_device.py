"""Every tensor is made on the device where it is used. These tests need no second device.

They run what a GPU would compute on torch's device "meta", whose tensors have a shape but no data.
Like a GPU's, they cannot be combined with one of the CPU, so a `torch.zeros(n)` without its device
fails here and not only on a machine with a GPU. Values are left to the other tests.
"""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quantise
import train_gpt
from conftest import PARTS, evaluator

META = torch.device("meta")


@pytest.fixture
def elsewhere(run_of):
    """A function that makes a Run, with its Validation, on a device that is not the CPU."""

    def make(**changes) -> train_gpt.Run:
        there = {"device": META, "attend": train_gpt.load_attention("math")}
        changes |= {"COMPUTE_DTYPE": "bfloat16", "MICRO_BATCH_TOKENS": 384}
        run = run_of(parts=there, **changes)
        run.val = val = train_gpt.read_validation(run.hp, torch.device("cpu"))
        val.tokens = val.tokens.to(META)
        return run

    return make


def on_device(*tensors: torch.Tensor) -> bool:
    return {tensor.device for tensor in tensors} == {META}


@pytest.mark.parametrize(
    "changes", [{}, {"SWA_ENABLED": 1, "EMA_ENABLED": 0}, {**PARTS, "BIGRAM_VOCAB_SIZE": 0}]
)
def test_training(elsewhere, changes):
    run = elsewhere(**changes)
    assert run.accumulation > 1
    for settings in ((1.0, 0.9, False, 8), (0.1, 0.9, True, 32, True)):
        assert on_device(run.train_step(0, train_gpt.StepSettings(*settings)))
    run.average.apply()
    run.optimizer.sync_banks()
    state = run.tensors()
    sums = run.calibrate(range(1))
    assert on_device(*run.optimizer.weights().values(), *state.values(), *sums.values())
    for name, tensor in state.items():
        whole = run.optimizer.gather(name, tensor)
        assert on_device(whole)
        run.optimizer.scatter(name, tensor, torch.zeros(whole.shape, device=META))


def test_export(elsewhere, monkeypatch):
    """Up to the codes, in a form that needs no values. The coder runs on the CPU."""
    run = elsewhere(NUM_LAYERS=1, XSA_LAST_N=1)
    calibration = run.calibrate(range(1))
    monkeypatch.setattr(torch.Tensor, "all", lambda finite: True)  # that has a value
    quantisers = train_gpt.make_quantisers(run.optimizer.weights(), run.hp, calibration)
    assert all(on_device(*one.round(1e-9)) for one in quantisers.values())
    assert len(quantisers) == len(train_gpt.MATRICES) + len(train_gpt.TABLES)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: torch.zeros(t.shape, dtype=t.dtype))
    hosts = [vars(one.on_host()) for one in quantisers.values()]
    tensors = [t for host in hosts for t in host.values() if isinstance(t, torch.Tensor)]
    assert len(tensors) == 8 * len(hosts) and all(t.device.type == "cpu" for t in tensors)


def test_rotated_matrices():
    matrices = (torch.ones(2, *size, device=META) for size in ((40, 9), (9, 9), (40, 40)))
    one = quantise.RotatedQuantiser(*matrices, 8, train_gpt.Rule(0.1))
    codes, steps, expected = one.round(1e-9)
    assert on_device(codes, steps, expected)
    assert on_device(quantise.rows_of_codes(codes, steps, 8, rotated=True))


def silent_evaluator(run) -> train_gpt.Evaluator:
    """An evaluator without progress lines, whose figures need values."""
    scorer = evaluator(run.model, run.val, run.hp, run.runtime, run.hp.eval_stride)
    scorer.reported = math.inf
    return scorer


def test_evaluation(elsewhere):
    """Spans need no values from the device."""
    scorer = silent_evaluator(elsewhere())
    for spans in (scorer.val.spans(), [(0, scorer.val.targets)]):
        scorer.score(train_gpt.plan_windows(spans, 32, 8)[:, :40])
    assert on_device(scorer.nats, scorer.count)


class Transfers(TorchDispatchMode):
    """Notes the operators that combine device and CPU: copies for which a GPU's host may wait."""

    found = ()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        options = options or {}
        result = operator(*arguments, **options)
        leaves = tree_leaves((arguments, options, result))
        if len({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}) > 1:
            self.found += ((operator, options.get("non_blocking", False)),)
        return result


def test_evaluation_copies_one_table_for_each_shape(elsewhere):
    """Not one or more for each batch, and none that the host waits for."""
    scorer = silent_evaluator(elsewhere())
    scorer.forward = mock.Mock(side_effect=lambda _, y, *__, **___: torch.ones_like(y))
    windows = scorer.windows()
    with Transfers() as transfers:
        scorer.score(windows[:, 1:])
    assert scorer.forward.call_count > 10
    assert transfers.found == ((torch.ops.aten._to_copy.default, True),)


def test_test_time_training(elsewhere):
    run = elsewhere(TTT_CHUNK_TOKENS=64, TTT_LORA_CHUNK=24, NUM_LAYERS=1, XSA_LAST_N=1)
    scorer = silent_evaluator(run)
    assert on_device(train_gpt.sgd_gradients(scorer, 0))
    state = train_gpt.LoraState(run.val.spans()[:3], train_gpt.lora_adapter(run.hp, META))
    train_gpt.lora_step(scorer, state, 0, 24)
    tensors = (*state.factors.values(), *state.squares.values())
    assert on_device(scorer.nats, scorer.count, *tensors)
