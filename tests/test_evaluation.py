"""Every target is scored exactly once, whatever the windows; the score is nats and bytes, nothing else."""

import dataclasses
import math

import pytest
import torch

import train_gpt
from conftest import made
from train_gpt import Ranks, Validation, evaluate


@pytest.fixture
def setting(one_rank):
    def make(**changes):
        hp, runtime = one_rank(**changes)
        return hp, runtime, Validation(hp, runtime.device)

    return make


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (32, 1), (32, 31), (48, 7)])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("targets", [48, 49, 111, 240])
def test_every_target_is_scored_once(setting, window, stride, size, targets):
    """Faults B8, B8b, B24: the last 64 targets were counted 32 times, and a tail that depends on the window dropped.

    The model is replaced by one whose loss at target number j is one bit of j; the sums of eight bits together tell
    whether a target is missing or counted twice.
    """
    hp, runtime, val = setting(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride)
    val.tokens, val.nbytes, val.targets = torch.arange(targets + 1, dtype=torch.int32), torch.ones(targets, dtype=torch.int16), targets
    val.total_bytes = targets
    for bit in range(8):  # the loss of target number j is bit `bit` of j: eight sums tell the multiset apart
        total = 0.0
        for rank in range(size):
            shared = dataclasses.replace(runtime, ranks=AllReduceLater(rank, size))
            with pytest.raises(AllReduceLater.Caught) as caught:
                evaluate(lambda x, y, reduction, bit=bit: ((y - 1) >> bit & 1).float(), val, hp, shared, stride)
            total += caught.value.args[0][0].item()
        assert total == sum(j >> bit & 1 for j in range(targets))


class AllReduceLater(Ranks):
    """Ranks that run one after the other in this process: the sum of a rank is caught before it would be shared."""

    class Caught(Exception):
        pass

    def all_reduce(self, tensor):
        raise self.Caught(tensor)


def test_context_of_sliding_windows(setting):
    """Each scored target but those of the first window has at least T - stride tokens before it in its window."""
    hp, runtime, val = setting()
    val.tokens = torch.arange(val.targets + 1, dtype=torch.int32)  # targets name their positions
    context = evaluate(lambda x, y, reduction: (y - x[:, :1]).float(), val, hp, runtime, 8).nats * val.targets
    window = hp.eval_seq_len
    expected = sum(j + 1 if j < window else window - 8 + 1 + (j - window) % 8 for j in range(val.targets))
    assert context == expected


def test_bits_per_byte_are_nats_over_bytes(setting):
    """Fault D2: a field called val_loss held bits per byte."""
    hp, runtime, val = setting()
    score = evaluate(lambda x, y, reduction: torch.full(x.shape, 2.0), val, hp, runtime, 32)
    assert score.nats == pytest.approx(2.0)
    assert score.bits_per_byte == pytest.approx(2.0 / math.log(2) * val.targets / val.total_bytes)
    assert score.fields() == f"val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f}"


def test_score_does_not_depend_on_the_batch(setting):
    hp, runtime, val = setting()
    model = made(hp, runtime.attend, torch.float32, 0)
    scores = [evaluate(model, val, dataclasses.replace(hp, val_batch_size=size), runtime, 8).nats for size in (32, 96, 1024)]
    assert max(scores) - min(scores) < 1e-6


def test_sliding_score_is_the_plain_sum(setting):
    """Window by window in a Python loop, as one would write it first."""
    hp, runtime, val = setting()
    model = made(hp, runtime.attend, torch.float32, 0)
    tokens, stride, window, total = val.tokens.long(), 8, hp.eval_seq_len, 0.0
    for target in range(val.targets):
        start = 0 if target < window else -(-(target + 1 - window) // stride) * stride
        if target % 97 == 0:
            x = tokens[start : target + 1][None]
            total += -model(x)[0, -1].log_softmax(-1)[tokens[target + 1]].item()
    positions = torch.arange(val.targets) % 97 == 0
    nats = torch.zeros(val.targets)
    for number, start in enumerate(range(0, val.targets - window + stride, stride)):
        index = torch.arange(start, start + window).clamp(max=val.targets - 1)
        out = model(tokens[index][None], tokens[index + 1][None], "none")[0]
        first = 0 if number == 0 else window - stride
        stop = min(window, val.targets - start)
        nats[start + first : start + stop] = out[first:stop].detach()
    picked = nats[positions].double().sum()
    assert picked.item() == pytest.approx(total, rel=1e-5)
    assert evaluate(model, val, hp, runtime, stride).nats == pytest.approx(nats.double().mean().item(), rel=1e-6)


def test_lost_target_is_noticed(setting):
    hp, runtime, val = setting()
    val.total_bytes += 1
    with pytest.raises(RuntimeError, match="instead of"):
        evaluate(lambda x, y, reduction: torch.zeros(x.shape), val, hp, runtime, 8)


def test_long_windows_do_not_break_the_model(setting):
    """Windows longer than the training sequences use the same rotary frequencies."""
    hp, runtime, val = setting(EVAL_SEQ_LEN=128, EVAL_STRIDE=64)
    model = made(hp, runtime.attend, torch.float32, 0)
    assert math.isfinite(evaluate(model, val, hp, runtime, 64).nats)
    assert train_gpt.rotary_tables(hp)[0].size(0) == 128
