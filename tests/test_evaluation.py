"""Every target is scored exactly once, whatever the windows; the score is nats and bytes, nothing else."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

import train_gpt
from conftest import made, matrices_of
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
    val.tokens, val.nbytes, val.targets = (
        torch.arange(targets + 1, dtype=torch.int32),
        torch.ones(targets, dtype=torch.int16),
        targets,
    )
    val.total_bytes = targets
    for bit in range(8):  # the loss of target number j is bit `bit` of j: eight sums tell the multiset apart
        total = 0.0
        for rank in range(size):
            shared = dataclasses.replace(runtime, ranks=AllReduceLater(rank, size))
            with pytest.raises(AllReduceLater.Caught) as caught:
                evaluate(lambda x, y, reduction, tail=0, bit=bit: ((y - 1) >> bit & 1).float(), val, hp, shared, stride)
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
    context = evaluate(lambda x, y, reduction, tail=0: (y - x[:, :1]).float(), val, hp, runtime, 8).nats * val.targets
    window = hp.eval_seq_len
    expected = sum(j + 1 if j < window else window - 8 + 1 + (j - window) % 8 for j in range(val.targets))
    assert context == expected


def test_bits_per_byte_are_nats_over_bytes(setting):
    """Fault D2: a field called val_loss held bits per byte."""
    hp, runtime, val = setting()
    score = evaluate(lambda x, y, reduction, tail=0: torch.full(x.shape, 2.0), val, hp, runtime, 32)
    assert score.nats == pytest.approx(2.0)
    assert score.bits_per_byte == pytest.approx(2.0 / math.log(2) * val.targets / val.total_bytes)
    assert score.fields() == f"val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f}"


def test_score_does_not_depend_on_the_batch(setting):
    hp, runtime, val = setting()
    model = made(hp, runtime.attend, torch.float32, 0)
    scores = [
        evaluate(model, val, dataclasses.replace(hp, val_batch_size=size), runtime, 8).nats for size in (32, 96, 1024)
    ]
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
        evaluate(lambda x, y, reduction, tail=0: torch.zeros(x.shape), val, hp, runtime, 8)


def test_long_windows_do_not_break_the_model(setting):
    """Windows longer than the training sequences use the same rotary frequencies."""
    hp, runtime, val = setting(EVAL_SEQ_LEN=128, EVAL_STRIDE=64)
    model = made(hp, runtime.attend, torch.float32, 0)
    assert math.isfinite(evaluate(model, val, hp, runtime, 64).nats)
    assert train_gpt.rotary_tables(hp)[0].size(0) == 128


# Windows, documents, the short way through the last layer


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (32, 5), (64, 1)])
def test_windows_cover_every_span_once(window, stride):
    spans = np.array([[0, 3], [3, 35], [35, 36], [36, 200], [200, 232], [232, 265]])
    windows = train_gpt.plan_windows(spans, window, stride)
    scored = np.concatenate([np.arange(a, b) for a, b in zip(windows.scored, windows.stop, strict=True)])
    assert sorted(scored) == list(range(265))
    for start, first, stop in zip(*windows, strict=True):
        begin, end = next((a, b) for a, b in spans if a <= start < b)
        assert begin <= start <= first < stop <= min(end, start + window), "no window reaches over the border of a span"
        assert start == begin or first - start == window - stride, "context of all but the first"


@pytest.mark.parametrize("tail", [1, 5, 23, 24])
@pytest.mark.parametrize("changes", [{}, {"XSA_LAST_N": 0, "NUM_KV_HEADS": 4}, {"NUM_LAYERS": 1, "XSA_LAST_N": 1}])
def test_tail_of_a_window_is_the_end_of_the_whole(one_rank, tail, changes):
    hp, runtime = one_rank(**changes)
    model = made(hp, runtime.attend, torch.float32, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        ids = torch.randint(1, hp.vocab_size, (3, 25), generator=torch.Generator().manual_seed(2))
        whole = model(ids[:, :-1], ids[:, 1:], "none")
        end = model(ids[:, :-1], ids[:, -tail:], "none", tail=tail)
    assert end.shape == (3, tail)
    torch.testing.assert_close(end, whole[:, -tail:], rtol=1e-5, atol=1e-5)


def test_tail_costs_less_in_the_last_layer_alone(one_rank):
    """Keys and values of all positions, everything else of those that are scored."""
    hp, runtime = one_rank()
    model = made(hp, runtime.attend, torch.float32, 0)
    shapes, real = [], train_gpt.F.linear
    ids = torch.ones(2, 24, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.F, "linear", lambda x, w: shapes.append((x.size(1), tuple(w.shape))) or real(x, w))
        model(ids, ids[:, -4:], "none", tail=4)
    by_layer = [shapes[1 + 6 * i : 7 + 6 * i] for i in range(3)]  # bigram first, the head last
    assert [[time for time, _ in layer] for layer in by_layer] == [[24] * 6, [24] * 6, [4, 24, 24, 4, 4, 4]]
    assert shapes[-1] == (4, (hp.vocab_size, hp.model_dim))


def shuffled(setting, **changes):
    hp, runtime, val = setting(**changes)
    val.tokens = val.tokens.clone()
    val.tokens[[9, 10, 90, 150, 391]] = train_gpt.BOS
    model = made(hp, runtime.attend, torch.float32, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return hp, runtime, val, model


@pytest.mark.parametrize("stride", [32, 8])
def test_documents_are_scored_as_if_each_were_alone(setting, stride):
    hp, runtime, val, model = shuffled(setting, EVAL_DOCUMENTS=1, EVAL_STRIDE=stride)
    together = evaluate(model, val, hp, runtime, stride)
    begins = [0, *(val.tokens[1:-1] == train_gpt.BOS).nonzero().flatten().add(1).tolist(), val.targets]
    total = 0.0
    with torch.no_grad():
        for begin, end in zip(begins, begins[1:], strict=False):
            for target in range(begin, end):
                start = begin if target < begin + 32 else begin + -(-(target + 1 - begin - 32) // stride) * stride
                if target % 11 == 0 or end - begin < 40:
                    ids = val.tokens[start : target + 1][None].long()
                    total += -model(ids)[0, -1].log_softmax(-1)[int(val.tokens[target + 1])].item()
        evaluator = train_gpt.Evaluator(model, val, hp, runtime, stride, lambda text: None)
        evaluator.score(train_gpt.plan_windows(val.spans(True), 32, stride))
    picked = [
        t
        for begin, end in zip(begins, begins[1:], strict=False)
        for t in range(begin, end)
        if t % 11 == 0 or end - begin < 40
    ]
    assert evaluator.nats[picked].double().sum().item() == pytest.approx(total, rel=1e-5)
    assert together.targets == val.targets and together.nbytes == val.total_bytes
    assert together.nats == pytest.approx(evaluator.nats[:-1].double().mean().item(), rel=1e-9)
    packed = evaluate(model, val, dataclasses.replace(hp, eval_documents=False), runtime, stride)
    assert packed.nats != together.nats


def test_shapes_are_few_and_known(setting):
    """A compiled forward meets one shape for each width, the last batch included."""
    for documents, widths in ((0, {(32, 32), (32, 8)}), (1, None)):
        hp, runtime, val, model = shuffled(setting, EVAL_DOCUMENTS=documents)
        seen = set()

        def forward(ids, targets, reduction, tail=0, model=model, seen=seen):
            seen.add((*ids.shape, targets.size(1)))
            return model(ids, targets, reduction, tail=tail)

        evaluate(forward, val, hp, runtime, 8)
        assert len(seen) == len({shape[1:] for shape in seen}), "as many rows in every batch of a width"
        assert widths is None or {shape[1:] for shape in seen} == widths


def test_ctrl_c_leaves_a_partial_result(setting):
    hp, runtime, val = setting()
    calls = []

    def forward(ids, targets, reduction, tail=0):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return torch.full(targets.shape, 2.0)

    with pytest.raises(train_gpt.Interrupted) as caught:
        evaluate(forward, val, hp, runtime, 8)
    score = caught.value.args[0]
    assert 0 < score.targets < val.targets and score.nats == 2.0
    assert score.nbytes == int(val.nbytes[: score.targets].sum()), "the first targets, in order"
    assert score.bits_per_byte == pytest.approx(2.0 / math.log(2) * score.targets / score.nbytes)


def test_progress_says_how_far_and_how_long(setting, monkeypatch):
    hp, runtime, val = setting()
    clock, said = iter(range(0, 10**6, 11)), []
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(clock))
    evaluate(lambda ids, targets, reduction, tail=0: torch.full(targets.shape, 2.0), val, hp, runtime, 8, said.append)
    shares = [
        float(re.search(r"^evaluating stride:8 done:(\S+)% bpb_so_far:\d+\.\d{4} eta:\d+s$", text).group(1))
        for text in said
    ]
    assert shares == sorted(shares) and len(shares) > 3 and shares[-1] == 100.0


# Test-time training


def learner(setting, **changes):
    hp, runtime, val, model = shuffled(setting, TTT_ENABLED=1, TTT_LORA_CHUNK=8, **changes)
    log = train_gpt.Log(hp, Ranks(1, 2))  # not rank 0: it writes nothing
    log.line = (lines := []).append
    evaluator = train_gpt.Evaluator(model, val, hp, runtime, hp.eval_stride, lambda text: None)
    return train_gpt.ScoreFirst(model, evaluator, log), lines


def test_sgd_by_the_published_recipe(setting):
    """The first two chunks by hand: score, three steps of SGD with momentum on the chunk, score."""
    chunk = 64
    taught, _ = learner(setting, TTT_CHUNK_TOKENS=chunk, TTT_LR=0.05)
    hp, val = taught.hp, taught.val
    twin = made(hp, taught.runtime.attend, torch.float32, 0)
    twin.load({name: p.detach().clone() for name, p in taught.model.named_parameters()})
    taught.run()
    untaught = train_gpt.Evaluator(twin, val, hp, taught.runtime, 8, lambda text: None)
    windows = train_gpt.plan_windows(val.spans(False), 32, 8)
    untaught.score(windows.select(windows.scored < chunk))
    sgd = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        x = val.tokens[: chunk + 1].long()
        twin(x[:-1].view(-1, 32), x[1:].view(-1, 32)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        sgd.step()
    untaught.score(windows.select((windows.scored >= chunk) & (windows.scored < 2 * chunk)))
    done = ~untaught.nats.isnan()
    assert done.sum() >= 2 * chunk
    torch.testing.assert_close(
        taught.evaluator.nats[:-1][done[:-1]], untaught.nats[:-1][done[:-1]], rtol=1e-4, atol=1e-4
    )


def test_frozen_blocks_stay_as_they_are(setting):
    taught, _ = learner(setting, TTT_CHUNK_TOKENS=64, TTT_LR=0.05, TTT_FREEZE_BLOCKS=2)
    before = {
        name: p.clone() for name, p in matrices_of({n: p.detach() for n, p in taught.model.named_parameters()}).items()
    }
    taught.run()
    after = matrices_of({n: p.detach() for n, p in taught.model.named_parameters()})
    for name, tensor in after.items():
        if name.startswith("blocks"):
            assert torch.equal(tensor, before[name]) == (int(name.split(".")[1]) < 2), name
    assert torch.equal(after["attn_scale"][:2], before["attn_scale"][:2]) and not torch.equal(
        after["attn_scale"][2], before["attn_scale"][2]
    )
    assert not torch.equal(after["tok_emb"], before["tok_emb"])


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_training_on_what_was_scored_helps_where_text_repeats_itself(setting, mode):
    taught, _ = learner(setting, TTT_MODE=mode, TTT_CHUNK_TOKENS=64, TTT_LR=0.1, TTT_LORA_LR=0.02)
    taught.val.tokens[:] = taught.val.tokens[100:116].repeat(len(taught.val.tokens) // 16 + 1)[: len(taught.val.tokens)]
    without = evaluate(taught.model, taught.val, taught.hp, taught.runtime, 8).nats
    assert taught.run().nats < without - 0.3


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_time_limit_ends_the_training_not_the_scoring(setting, mode):
    taught, lines = learner(setting, TTT_MODE=mode, TTT_CHUNK_TOKENS=64, TTT_LR=0.1, EVAL_MAX_SECONDS=1e-9)
    score = taught.run()
    assert score.targets == taught.val.targets
    assert (
        len(lines) == 1
        and "EVAL_MAX_SECONDS=1e-09 are over after" in lines[0]
        and "scored without further training" in lines[0]
    )


def test_an_adapter_is_a_change_of_the_weights(one_rank):
    """Each row of a batch has its own: the same as a model whose matrices are W + B A."""
    hp, runtime = one_rank()
    model = made(hp, runtime.attend, torch.float32, 0)
    adapter = train_gpt.new_adapter(hp, 2, torch.device("cpu"))
    ids = torch.randint(1, hp.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids)
        torch.testing.assert_close(model(ids, adapter=adapter), plain)
        for _, b in adapter.values():
            b.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.3)
        together = model(ids, adapter=adapter)
        for row in range(2):
            twin = made(hp, runtime.attend, torch.float32, 0)
            for kind in train_gpt.MATRICES:
                if kind.name in adapter:
                    a, b = (matrix[row] for matrix in adapter[kind.name])
                    # The forward folds the gain into the matrix, the change comes after it.
                    gain = getattr(twin, kind.gain)[..., None] if kind.gain else 1.0
                    scale = twin.layer_scale if kind.normed else 1.0
                    train_gpt.bank_part(getattr(twin, kind.bank), kind).add_(b @ a / gain / scale)
            torch.testing.assert_close(together[row], twin(ids[row : row + 1])[0], rtol=1e-4, atol=1e-4)
        assert (together - plain).abs().max() > 0.1


def test_low_rank_training_by_hand(setting):
    """One document: score a chunk, one step of AdamW on its mean loss, score the next; gradients are of that chunk alone."""
    taught, _ = learner(setting, TTT_MODE="lora", TTT_LORA_LR=0.02)
    hp, val, model = taught.hp, taught.val, taught.model
    taught._documents(np.array([[200, 221]]), 0.0, 1.0)
    a = [
        train_gpt.new_adapter(hp, 1, torch.device("cpu"))[name][0].detach().requires_grad_()
        for name in train_gpt.LORA_KINDS
    ]
    b = [
        train_gpt.new_adapter(hp, 1, torch.device("cpu"))[name][1].detach().requires_grad_()
        for name in train_gpt.LORA_KINDS
    ]
    adam = torch.optim.AdamW([*a, *b], lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
    adapter, tokens = dict(zip(train_gpt.LORA_KINDS, zip(a, b, strict=True), strict=True)), val.tokens.long()
    for first, stop in ((200, 208), (208, 216), (216, 221)):
        nats = model(tokens[200:stop][None], tokens[201 : stop + 1][None], "none", adapter=adapter)[0, first - 200 :]
        torch.testing.assert_close(taught.evaluator.nats[first:stop], nats.detach(), rtol=1e-4, atol=1e-4)
        adam.zero_grad()
        nats.mean().backward()
        adam.step()
    assert (~taught.evaluator.nats[:-1].isnan()).sum() == 21
