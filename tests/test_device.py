"""Every tensor is made on the device where it is used. These tests need no second device.

They run what a GPU would compute with tensors on torch's device "meta", which have a shape but no data. Like a GPU's,
a meta tensor cannot be combined with one of the CPU, so a `torch.zeros(n)` without its device fails here and not only
on a machine with a GPU. Values are left to the other tests.
"""

import dataclasses
import math

import pytest
import torch

import train_gpt

META = torch.device("meta")


@pytest.fixture
def elsewhere(one_rank, tmp_path, monkeypatch):
    """A function that makes a Training, with its Validation, on a device that is not the CPU."""
    monkeypatch.chdir(tmp_path)

    def make(**changes) -> train_gpt.Training:
        hp, runtime = one_rank(COMPUTE_DTYPE="bfloat16", MICRO_BATCH_TOKENS=256, **changes)
        val = train_gpt.Validation(hp, runtime.device)
        val.tokens, val.nbytes = val.tokens.to(META), val.nbytes.to(META)
        runtime = dataclasses.replace(runtime, device=META, attend=train_gpt.load_attention("math"))
        return train_gpt.Training(hp, runtime, train_gpt.Log(hp, runtime.comm), val)

    return make


def on_device(*tensors: torch.Tensor) -> bool:
    return {tensor.device for tensor in tensors} == {META}


@pytest.mark.parametrize("changes", [{}, {"SWA_ENABLED": 1, "EMA_ENABLED": 0}, {"BIGRAM_VOCAB_SIZE": 0}])
def test_training(elsewhere, changes):
    run = elsewhere(**changes)
    assert run.accumulation > 1
    for settings in (train_gpt.StepSettings(1.0, 0.9, False, 8), train_gpt.StepSettings(0.1, 0.9, True, 32)):
        assert on_device(run.train_step(0, settings))
    run.average.apply()
    run.optimizer.sync_replicas()
    state = run.tensors()
    assert on_device(*run.optimizer.weights().values(), *state.values(), *run.calibrate(range(1))[0].values())
    for name, tensor in state.items():
        assert on_device(run.optimizer.whole(name, tensor))
        run.optimizer.distribute(name, tensor, torch.zeros(run.optimizer.whole(name, tensor).shape, device=META))
    run.loader.close()


def test_export(elsewhere):
    """Up to the codes. The coder runs on the CPU."""
    run = elsewhere()
    weights, (hessians, _), seen = run.optimizer.weights(), run.calibrate(range(1)), 0
    for kind, _, tensor in train_gpt.export_views(weights):
        if kind is not None:
            bits, clip = train_gpt.code_range(kind, run.hp)
            scale = train_gpt.row_scales(tensor, bits, clip)
            codes = train_gpt.to_codes(tensor, scale, bits)
            if kind.reads:
                codes = train_gpt.gptq(tensor, hessians[kind.reads], scale, bits)
            assert on_device(scale, codes)
            seen += 1
    assert seen == len(train_gpt.MATRICES) + len(train_gpt.TABLES)
    run.loader.close()


def silent_evaluator(run) -> train_gpt.Evaluator:
    """An evaluator without progress lines. On a slow machine one could be due, and its figures need values."""
    evaluator = train_gpt.Evaluator(run.model, run.val, run.hp, run.runtime, run.hp.eval_stride)
    evaluator.reported = math.inf
    return evaluator


@pytest.mark.parametrize("documents", [0, 1])
def test_evaluation(elsewhere, documents):
    run = elsewhere(EVAL_DOCUMENTS=documents)
    evaluator = silent_evaluator(run)
    windows = train_gpt.plan_windows(run.val.spans(bool(documents)), run.hp.eval_seq_len, run.hp.eval_stride)
    evaluator.score(windows[:, :40])
    assert on_device(evaluator.nats, evaluator.count)
    run.loader.close()


def test_test_time_training(elsewhere):
    run = elsewhere(TTT_ENABLED=1, TTT_CHUNK_TOKENS=512, TTT_LORA_CHUNK=8)
    scorer = silent_evaluator(run)
    assert on_device(*train_gpt.sgd_gradients(run.model, scorer, 0).values())
    train_gpt.lora_documents(run.model, scorer, run.val.spans(True)[:5])
    assert on_device(scorer.nats, scorer.count)
    run.loader.close()
