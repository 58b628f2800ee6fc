"""That every tensor is made on the device it is used on, also where there is no second device.

All that a GPU would compute is gone through with tensors that have a shape and nothing in them (torch's device "meta").
Like one of a GPU such a tensor cannot be combined with one of the CPU, so that a `torch.zeros(n)` without its device
fails here and not only on a machine with a GPU. Numbers, and whatever depends on them, are left to the other tests.
"""

import dataclasses
import math

import pytest
import torch

import train_gpt

META = torch.device("meta")


@pytest.fixture
def elsewhere(one_rank, tmp_path, monkeypatch):
    """A function: a Training on a device that is not the CPU, with its Validation there."""
    monkeypatch.chdir(tmp_path)

    def make(**changes) -> train_gpt.Training:
        hp, runtime = one_rank(COMPUTE_DTYPE="bfloat16", MICRO_BATCH_TOKENS=256, **changes)
        val = train_gpt.Validation(hp, runtime.device)
        val.spans = {
            documents: val.spans(documents) for documents in (False, True)
        }.get  # made on the CPU, of what the tokens say
        val.tokens, val.nbytes = val.tokens.to(META), val.nbytes.to(META)
        runtime = dataclasses.replace(runtime, device=META, attend=train_gpt.load_attention("math"))
        return train_gpt.Training(hp, runtime, train_gpt.Log(hp, runtime.ranks), val)

    return make


def on_device(*tensors: torch.Tensor) -> bool:
    return {tensor.device for tensor in tensors} == {META}


@pytest.mark.parametrize(
    "changes", [{}, {"SWA_ENABLED": 1, "EMA_ENABLED": 0, "TIE_EMBEDDINGS": 0, "REDUCE_DTYPE": "float32"}]
)
def test_training(elsewhere, changes):
    run = elsewhere(**changes)
    assert run.accumulation > 1
    for moment in (train_gpt.Moment(1.0, 0.9, False, 8), train_gpt.Moment(0.1, 0.9, True, 32)):
        assert on_device(run.train_step(0, moment))
    run.average.apply()
    run.optimizers.publish()
    assert on_device(*run.optimizers.weights().values(), *run.tensors().values(), *run._moments(0, 1).values())
    run.loader.close()


def test_export(elsewhere):
    """Up to the codes, which are coded on the CPU."""
    run = elsewhere()
    weights, moments, seen = run.optimizers.weights(), run._moments(0, 1), 0
    for kind, _, tensor in train_gpt.export_views(weights):
        if kind is not None:
            bits, clip = train_gpt.code_range(kind, run.hp)
            scale = train_gpt.row_scales(tensor, bits, clip)
            codes = (
                train_gpt.gptq(tensor, moments[kind.reads], scale, bits)
                if kind.reads
                else train_gpt.to_codes(tensor, scale, bits)
            )
            assert on_device(scale, codes)
            seen += 1
    assert seen == len(train_gpt.MATRICES) + 3
    run.loader.close()


def silent_evaluator(run) -> train_gpt.Evaluator:
    """An evaluator that never prints progress: on a slow machine the line would fall due, and its score needs numbers."""
    evaluator = train_gpt.Evaluator(run.model, run.val, run.hp, run.runtime, run.hp.eval_stride, print)
    evaluator.said = math.inf
    return evaluator


@pytest.mark.parametrize("documents", [0, 1])
def test_evaluation(elsewhere, documents):
    run = elsewhere(EVAL_DOCUMENTS=documents)
    evaluator = silent_evaluator(run)
    windows = train_gpt.plan_windows(run.val.spans(bool(documents)), run.hp.eval_seq_len, run.hp.eval_stride)
    evaluator.score(windows.select(slice(0, 40)))
    assert on_device(evaluator.nats, evaluator.count)
    run.loader.close()


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_test_time_training(elsewhere, mode):
    run = elsewhere(TTT_ENABLED=1, TTT_MODE=mode, TTT_CHUNK_TOKENS=512, TTT_LORA_CHUNK=8, TTT_FREEZE_BLOCKS=1)
    evaluator = silent_evaluator(run)
    learner = train_gpt.ScoreFirst(run.model, evaluator, run.log)
    if mode == "sgd":
        assert on_device(*learner._gradients(dict(run.model.named_parameters()), 0).values())
    else:
        learner._documents(run.val.spans(True)[:5], 0.0, 1.0)
    run.loader.close()
