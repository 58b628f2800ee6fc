"""Every target is scored exactly once with any windows, and the score is nats over bytes."""

import copy
import dataclasses
import functools
import itertools
import math
import re
import sys
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from conftest import PARTS, evaluate, evaluator, made, noise, user_error, weights_of
from train_gpt import Comm, read_validation


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that windows of a few tokens have several widths."""
    monkeypatch.setattr(train_gpt, "TILE", 4)


@pytest.fixture
def setting(one_rank):
    def make(**changes):
        hp, runtime = one_rank(**changes)
        return hp, runtime, read_validation(hp, runtime.device)

    return make


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (32, 1), (32, 31), (48, 7), (4, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("targets", [48, 49, 111, 240])
def test_every_target_is_scored_once(setting, window, stride, size, targets):
    """Faults B8, B8b, B24: #399 counts the last 64 targets 32 times and drops a tail. The loss at
    target j is one bit of j, so eight sums show what is missing or counted twice."""
    blocks = {} if stride else {"MICRO_BATCH_TOKENS": 36}  # of a banded pass, which score 20
    hp, runtime, val = setting(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride or window, **blocks)
    val.tokens = torch.arange(targets + 1, dtype=torch.int32)
    val.nbytes = torch.ones(targets, dtype=torch.int16)
    val.targets = val.total_bytes = targets
    for bit in range(8):
        total = 0.0
        for rank in range(size):
            shared = dataclasses.replace(runtime, comm=OneRank(rank, size))
            with pytest.raises(OneRank.Caught) as caught:
                bits = lambda x, y, *_, bit=bit, **__: ((y - 1) >> bit & 1).float()  # noqa: E731
                evaluate(bits, val, hp, shared, stride)
            total += caught.value.args[0][0].item()
        assert total == sum(j >> bit & 1 for j in range(targets))


class OneRank(Comm):
    """One of several ranks, alone in this process. Its sum is raised as an exception."""

    class Caught(Exception):
        pass

    def all_reduce(self, tensor):
        raise self.Caught(tensor)


def test_bits_per_byte_are_nats_over_bytes(setting):
    """Fault D2: in #399 a field called val_loss holds bits per byte."""
    hp, runtime, val = setting()
    score = evaluate(lambda x, y, *_, **__: torch.full(y.shape, 2.0), val, hp, runtime, 32)
    assert score.val_loss == pytest.approx(2.0)
    assert score.val_bpb == pytest.approx(2.0 / math.log(2) * val.targets / val.total_bytes)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_lost_or_repeated_target_is_noticed(setting, change):
    """The last window is left out or scored twice (C4)."""
    hp, runtime, val = setting()
    scorer = evaluator(lambda x, y, *_, **__: torch.zeros(y.shape), val, hp, runtime, 8)
    windows = scorer.windows()
    scorer.score(windows[:, :-1] if change < 0 else windows[:, [*range(windows.shape[1]), -1]])
    _, first, stop = windows[:, -1]
    visited = val.targets + change * (stop - first)
    scored = f"scored {min(visited, val.targets)} of {val.targets} targets, {visited} times"
    with pytest.raises(RuntimeError, match=scored):
        scorer.result()


# ---- Windows, documents, and the head, which only computes what is scored ------------------------


def several_documents(setting, **changes):
    """(hyperparameters, runtime, validation stream with further BOS, random model)."""
    hp, runtime, val = setting(**changes)
    val.tokens = val.tokens.clone()
    val.tokens[[9, 10, 90, 150, 391]] = train_gpt.BOS
    val.documents = np.union1d(val.documents, [9, 10, 90, 150, 391])
    return hp, runtime, val, noise(made(hp, runtime.attend))


def shorten(val, targets):
    """Keep only the first targets of the stream."""
    val.tokens, val.nbytes, val.targets = val.tokens[: targets + 1], val.nbytes[:targets], targets
    val.total_bytes, val.documents = int(val.nbytes.sum()), val.documents[val.documents < targets]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("stride, changes", [(48, {}), (8, {**PARTS, "VAL_BATCH_SIZE": 96})])
def test_the_score_is_that_of_each_target_alone(setting, documents, stride, changes):
    """With documents: the windows of what low-rank training leaves over."""
    hp, runtime, val, model = several_documents(setting, EVAL_SEQ_LEN=48, **changes)
    shorten(val, 1000)
    scorer = evaluator(model, val, hp, runtime, stride)
    spans = val.spans() if documents else np.array([[0, val.targets]])
    if documents:
        scorer.score(train_gpt.plan_windows(spans, 48, stride))
    else:
        scorer.score(scorer.windows())
    for begin, end in spans.tolist():
        for target in [t for t in range(begin, end) if t % 29 == 0 or end - begin < 20]:
            later = max(0, -(-(target + 1 - begin - 48) // stride))
            ids = val.tokens[begin + later * stride : target + 1][None].long()
            nats = -model(ids)[0, -1].log_softmax(-1)[int(val.tokens[target + 1])]
            assert scorer.nats[target].item() == pytest.approx(nats.item(), rel=1e-4)
    result = scorer.result()
    assert result.val_bytes == val.total_bytes
    assert result.val_loss == pytest.approx(scorer.nats[:-1].double().mean().item())


def test_unscored_positions_skip_the_head(one_rank, monkeypatch):
    hp, runtime = one_rank()
    model = made(hp, runtime.attend)
    sizes, real = [], train_gpt.F.linear
    noted = lambda x, w: sizes.append(x.size(1)) or real(x, w)  # noqa: E731
    monkeypatch.setattr(train_gpt.F, "linear", noted)
    ids = torch.ones(2, 24, dtype=torch.int64)
    model(ids, ids[:, -4:], "none")
    # The bigram projection, 4 products per layer (q, k and v are one), and the head
    assert sizes == [24] + [24] * 12 + [4]


def test_progress_lines_are_of_all_ranks(setting, monkeypatch):
    hp, runtime, val = setting()
    seconds, lines = itertools.count(step=11), []
    monkeypatch.setattr(train_gpt, "perf_counter", lambda: next(seconds))
    losses = lambda ids, targets, *_, **__: torch.full(targets.shape, 2.0)  # noqa: E731
    shared = dataclasses.replace(runtime, comm=Comm(1, 2))
    scorer = evaluator(losses, val, hp, shared, 8, lambda line, **_: lines.append(line))
    scorer.score(scorer.windows())
    form = r"evaluating stride:8 done:(\S+)% bpb_so_far:\d+\.\d{4} eta:\d+s"
    shares = [float(re.fullmatch(form, line).group(1)) for line in lines]
    assert shares == sorted(shares) and len(shares) > 3 and 95 < shares[-1] <= 100


# ---- The banded pass -----------------------------------------------------------------------------
def one_long_pass(model, hp, tokens) -> torch.Tensor:
    """Losses of all targets (n,) by one forward of the whole stream with a mask."""
    long = dataclasses.replace(hp, eval_mode="sliding", eval_seq_len=len(tokens), eval_stride=1)
    reference = made(long, train_gpt.reference_attention)  # a mask over all positions
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        config = train_gpt.ForwardConfig(hp.layer_order(), band=hp.eval_seq_len)
        return reference(tokens[None, :-1].long(), tokens[None, 1:].long(), "none", config)[0]


def banded(setting, **changes):
    """(hyperparameters, runtime, validation text with several documents, random model)."""
    knobs = {"EVAL_MODE": "banded", "EVAL_SEQ_LEN": 8} | changes
    hp, runtime, val, model = several_documents(setting, **knobs)
    shorten(val, 450)
    return hp, runtime, val, model


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 3 layers score only 12 windows and read 4 more."""
    monkeypatch.setattr(train_gpt, "BAND_TARGETS", 12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"NUM_LAYERS": 1, "XSA_LAST_N": 1},
        {"MICRO_BATCH_TOKENS": 50},
        {"ATTN_WINDOW": 3, "MICRO_BATCH_TOKENS": 30},
        PARTS,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_banded_pass_is_one_long_pass(setting, blocks, changes, size):
    """However many visits of layers reach back, and on any number of ranks."""
    found = []
    for rank in range(size):
        hp, runtime, val, model = banded(setting, **changes)
        shared = dataclasses.replace(runtime, comm=Comm(rank, size))
        scorer = evaluator(model, val, hp, shared, 0)
        scorer.score(scorer.windows())
        found.append(scorer.nats[:-1])
    assert (sum((~nats.isnan()).long() for nats in found) == 1).all()
    together = sum(nats.nan_to_num(0) for nats in found)
    torch.testing.assert_close(together, one_long_pass(model, hp, val.tokens), rtol=1e-5, atol=1e-5)
    plain = evaluator(model, val, hp, runtime, 8)
    plain.score(plain.windows())
    assert not torch.allclose(plain.nats[8:-1], together[8:], atol=1e-3)


def test_a_block_is_no_longer_than_a_forward(hyperparameters):
    blocks = {0: 8192, 5000: 3976, 1160: 136, 1100: 128, 10**6: 8192}
    for tokens, scored in blocks.items():
        hp = hyperparameters(NUM_LAYERS=7, EVAL_SEQ_LEN=128, MICRO_BATCH_TOKENS=tokens)
        assert train_gpt.band_block(hp) == (1024, scored)
    windows = dataclasses.replace(hp, attn_window=32)  # in five layers
    assert train_gpt.band_block(windows)[0] == 128 + 5 * 32 + 2 * 128


@pytest.mark.parametrize("stride", [0, 8])
def test_a_window_reads_nothing_behind_its_targets(setting, stride):
    """Documents behind a short one, or a start at the stream's end that is read again, would be
    more than FlashAttention 3 has room for in a narrow window."""
    hp, runtime, val, model = banded(setting)
    val.tokens[val.targets - 1] = train_gpt.BOS
    found = []
    noted = lambda ids, *rest, **more: found.append(ids) or model(ids, *rest, **more)  # noqa: E731
    scorer = evaluator(noted, val, hp, runtime, stride)
    scorer.score(scorer.windows()[:, -1:])
    length = val.targets - scorer.windows()[0, -1]
    assert found[0].size(1) > length and not found[0][0, length:].any()
    assert torch.equal(found[0][0, :length], val.tokens[-length - 1 : -1].long())


def test_documents_are_counted_in_the_sequences_of_sgd_too(setting):
    knobs = dict(EVAL_MODE="sliding", EVAL_SEQ_LEN=512, TTT_CHUNK_TOKENS=128, TTT_ENABLED=1)
    hp, runtime, val, _ = banded(setting, **knobs, DOC_ATTENTION=1)
    val.documents = np.append(0, 100 + np.arange(16))  # 18 fit into 512 positions, 16 into 128
    fa3 = dataclasses.replace(runtime, attention="fa3")
    with user_error("17 documents begin within 128 positions"):
        evaluator(None, val, hp, fa3, 512)
    evaluator(None, val, dataclasses.replace(hp, ttt_chunk_tokens=512), fa3, 512)


@pytest.mark.parametrize("number", [1, 450])
def test_losses_that_are_not_finite_are_no_score(setting, number):
    hp, runtime, val, model = banded(setting)
    scorer = evaluator(model, val, hp, runtime, 8)
    scorer.score(scorer.windows())
    scorer.nats[:number] = math.inf if number == 1 else math.nan
    sentence = f"{number} of 450 validation losses are not finite: the weights are damaged"
    with user_error(sentence):
        scorer.result()


DOCUMENTS = torch.tensor([[0] * 3 + [1] * 20 + [2] * 1 + [3] * 64, [5] * 61 + [6] * 27])  # (2, 88)


@pytest.mark.parametrize("band", [0, 1, 5, 8, 64])
@pytest.mark.parametrize("time", [88, 40, 37, 5])
@pytest.mark.parametrize("name", ["reference", "plain", "sdpa", "math"])
@pytest.mark.parametrize("document", [None, DOCUMENTS])
def test_attention_within_bands_and_documents(band, time, name, document):
    """And its gradients."""
    generator = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 2, time, 4, 8, generator=generator)
    inputs = [q, *torch.randn(2, 2, time, 2, 8, generator=generator)]
    q, k, v = inputs = [tensor.requires_grad_() for tensor in inputs]
    document = document if document is None else document[:, :time]
    ones = torch.zeros(2, time) if document is None else document
    visible = torch.tensor([[0 <= i - j < (band or 99) for j in range(time)] for i in range(time)])
    visible = visible & (ones[:, :, None] == ones[:, None])
    scores = torch.einsum("bnhe,bthe->bhnt", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    expected = torch.einsum("bhnt,bthe->bnhe", weights, v.repeat_interleave(2, dim=2))
    own = {"reference": train_gpt.reference_attention, "plain": train_gpt.plain_attention}
    found = (own.get(name) or train_gpt.load_attention(name))(q, k, v, band, document)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(y, inputs, grad) for y in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.fixture
def fa3(hopper, monkeypatch):
    """The script's use of FlashAttention 3. Its window counts the positions before the query, and
    it aligns the last query of a sequence with the last key."""

    def fixed(q, k, v, causal=False, window_size=(-1, -1), deterministic=False):
        before, after = window_size
        assert causal and after in (0, -1)
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        return train_gpt.reference_attention(q, k, v, before + 1), None

    def varlen(q, k, v, queries, keys, longest_q, longest_k, **options):
        attend.longest = longest_k
        assert queries.dtype == keys.dtype == torch.int32 and len(queries) == len(keys)
        assert queries[-1] == len(q) and keys[-1] == len(k)
        y = torch.full_like(q, math.nan)
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
            assert 0 <= b - a <= min(d - c, longest_q) and d - c <= longest_k
            if b > a:
                y[a:b] = fixed(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0][0]
        return y

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = fixed, varlen
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    attend = train_gpt.load_attention("fa3")
    return attend


@pytest.mark.parametrize("band", [0, 7])
@pytest.mark.parametrize("document", [None, DOCUMENTS])
def test_windows_and_lengths_of_flash_attention_3(fa3, band, document, monkeypatch):
    """It repeats its gradients if asked to, and is told how long a document can be."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: band == 7)
    q, k, v = torch.randn(2, 88, 4, 8), torch.randn(2, 88, 2, 8), torch.randn(2, 88, 2, 8)
    expected = train_gpt.reference_attention(q, k, v, band, document)
    bounds = document if document is None else fa3.prepare(document)
    for limit, longest in ((0, 88), (64, 64), (99, 88)):
        torch.testing.assert_close(fa3(q, k, v, band, bounds, limit), expected)
        assert document is None or fa3.longest == longest
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        fa3.prepare(torch.arange(88).expand(2, 88))


def noting_shapes(model) -> set:
    """The set that gets all that a compiled graph of this model depends on, at each call."""
    shapes, forward = set(), model.forward

    def noted(ids, targets, reduction="mean", config=None, adapter=None, refused=None, **_):
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        shapes.add((*ids.shape, targets.size(1), reduction, adapter is not None, trained, config))
        return forward(ids, targets, reduction, config, adapter)

    model.forward = noted
    return shapes


WARM = [("", 0, 1), ("", 0, 2), ("sgd", 0, 1), ("sgd", 1, 2), ("lora", 0, 1), ("lora", 1, 2)]


@pytest.mark.parametrize("training, limit, size", WARM)
@pytest.mark.parametrize("mode", ["banded", "sliding"])
def test_the_warm_up_compiles_all_shapes(setting, blocks, monkeypatch, training, mode, limit, size):
    """And no others, but for what the time limit avoids. The weights are as before."""
    knobs = {"TTT_ENABLED": 1, "TTT_MODE": training, "TTT_CHUNK_TOKENS": 104} if training else {}
    knobs |= {"EVAL_MODE": mode, "EVAL_MAX_SECONDS": limit, "EVAL_STRIDE": 2}
    hp, runtime, val, model = banded(setting, TTT_LORA_CHUNK=4, MICRO_BATCH_TOKENS=48, **knobs)
    monkeypatch.setattr(train_gpt, "LORA_BATCH", 2)
    before, update = weights_of(model), train_gpt.lora_update

    def noted(factors, squares, grads, index, *rest):
        shapes.add((*map(len, factors.values()), len(index), "updated", True, None))
        update(factors, squares, grads, index, *rest)

    monkeypatch.setattr(train_gpt, "lora_update", noted)
    for rank in range(size):
        over = lambda *_, asked=itertools.count(): limit > 0 and next(asked) >= 3  # noqa: B008, E731
        monkeypatch.setattr(train_gpt, "out_of_time", over)
        runtime = dataclasses.replace(runtime, comm=Comm(rank, size))
        monkeypatch.setattr(runtime.comm, "all_reduce", lambda tensor: lambda: None)
        monkeypatch.setattr(runtime.comm, "gather", lambda value: [value])
        monkeypatch.setattr(runtime.comm, "broadcast", lambda value: value)
        shapes = noting_shapes(model)
        make_scorer = functools.partial(train_gpt.Evaluator, model, val, hp, runtime)
        train_gpt.warm_up_evaluation(make_scorer, train_gpt.final_passes(hp), mock.Mock())
        warm = set(shapes)
        shapes.clear()
        assert all(torch.equal(w, before[name]) for name, w in weights_of(model).items())
        assert all(parameter.requires_grad for parameter in model.parameters())
        for config, stride, score, _ in train_gpt.final_passes(hp).values():
            score(train_gpt.Evaluator(model, val, hp, runtime, config, stride))
        model.load_state_dict(before)
        assert shapes <= warm, "a graph compiles in a timed evaluation"
        assert shapes == warm or size > 1 or limit, "a graph that nothing uses"
        assert bool(training) == any(trained or adapter for *_, adapter, trained, _ in shapes)


@pytest.mark.parametrize("mode", ["banded", "sliding"])
def test_every_score_loops(hyperparameters, mode):
    """But for a validation before the layers loop."""
    hp = hyperparameters(**PARTS, EVAL_MODE=mode, TTT_ENABLED=1)
    ways = [*train_gpt.final_passes(hp).values(), train_gpt.validation_pass(hp)]
    assert len(ways) == 4
    assert {way.config.layer_order for way in ways} == {(0, 1, 2, 1, 2, 1, 2, 3, 4)}
    before = train_gpt.validation_pass(hp, looping=False)
    assert before.config.layer_order == (0, 1, 2, 3, 4)


# ---- Test-time training --------------------------------------------------------------------------
TTT = {"sgd": train_gpt.ttt_sgd, "lora": train_gpt.ttt_lora}


def learner(setting, mode="sgd", targets=0, **changes):
    """(model, evaluator, lines that it logs) for the whole text or its first targets."""
    knobs = dict(TTT_ENABLED=1, TTT_MODE=mode, TTT_LORA_CHUNK=8)
    hp, runtime, val, model = several_documents(setting, **knobs, **changes)
    if targets:
        shorten(val, targets)
    lines = []
    log = lambda line, **_: lines.append(line)  # noqa: E731
    scorer = evaluator(model, val, hp, runtime, hp.eval_stride, log)
    scorer.reported = math.inf  # no lines of progress, which a slow machine has
    return model, scorer, lines


def test_sgd_by_the_recipe_of_461(setting):
    """By hand, with one momentum and a cosine of rates over the chunks that train."""
    chunk = 64
    model, scorer, _ = learner(setting, "sgd", 250, TTT_CHUNK_TOKENS=chunk, TTT_LR=0.05)
    twin, val = copy.deepcopy(model), scorer.val
    train_gpt.ttt_sgd(scorer)
    expected = evaluator(twin, val, scorer.hp, scorer.runtime, 8)
    windows = train_gpt.plan_windows([(0, val.targets)], 32, 8)
    expected.score(windows[:, windows[1] < chunk])
    sgd = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for number, share in enumerate((1, 0.75, 0.25)):
        begin, sgd.param_groups[0]["lr"] = number * chunk, 0.05 * share
        x = val.tokens[begin : begin + chunk + 1].long()
        for _ in range(3):
            sgd.zero_grad()
            twin(x[:-1].view(-1, 32), x[1:].view(-1, 32)).backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            sgd.step()
        end = begin + chunk
        expected.score(windows[:, (windows[1] >= end) & (windows[1] < end + chunk)])
    torch.testing.assert_close(scorer.nats[:-1], expected.nats[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gradient_is_the_mean_over_all_ranks(setting, size):
    """Before it is clipped, by the compiled forward. Of three sequences, a fourth rank has none."""
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=96)
    scorer.forward = mock.Mock(side_effect=model, parameters=model.parameters)
    x = scorer.val.tokens[64:161].long()
    model(x[:-1].view(3, 32), x[1:].view(3, 32)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    total = torch.zeros_like(expected)
    for rank in range(size):
        scorer.runtime = dataclasses.replace(scorer.runtime, comm=OneRank(rank, size))
        with pytest.raises(OneRank.Caught) as caught:
            train_gpt.sgd_gradients(scorer, 64)
        total += caught.value.args[0]
    assert scorer.forward.call_count == min(size, 3)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)


def test_chunks_are_slices_of_the_windows(setting, monkeypatch):
    """A search among all windows for each chunk took minutes."""
    monkeypatch.setattr(train_gpt, "TTT_EPOCHS", 0)
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=64)
    windows, parts = scorer.windows(), []
    scorer.windows, scorer.score = lambda: windows, parts.append
    train_gpt.ttt_sgd(scorer)
    assert len(parts) == -(-scorer.val.targets // 64)
    for number, part in enumerate(parts):
        assert np.array_equal(part, windows[:, windows[1] // 64 == number])
        assert np.shares_memory(part, windows), "a slice, not a copy of what a mask selects"


@pytest.mark.parametrize("mode, steps", [("sgd", 4), ("lora", 5)])
def test_the_time_limit_ends_training_inside_a_chunk_or_document(setting, monkeypatch, mode, steps):
    """What was scored until then stays, and the rest is scored once. In SGD rank 0's clock decides."""
    monkeypatch.setattr(train_gpt, "LORA_ROWS", (16, 16))  # so each step is one forward
    learnt, asked = [], itertools.count()
    own = lambda _: "of this rank" if mode == "sgd" else next(asked) >= steps  # noqa: E731
    decided = lambda _, late: late == "of this rank" and next(asked) >= steps  # noqa: E731
    update = {"sgd": "sgd_gradients", "lora": "lora_update"}[mode]
    scores = []
    for limited in (False, True):
        knobs = {"TTT_CHUNK_TOKENS": 64, "TTT_LR": 0.1, "TTT_LORA_LR": 0.02}
        model, scorer, lines = learner(setting, mode, 500, EVAL_MAX_SECONDS=1e9, **knobs)
        if limited:
            monkeypatch.setattr(train_gpt, "out_of_time", own)
            monkeypatch.setattr(Comm, "broadcast", decided)
            real = getattr(train_gpt, update)
            counted = lambda *rest, real=real: learnt.append(1) or real(*rest)  # noqa: E731
            monkeypatch.setattr(train_gpt, update, counted)
        TTT[mode](scorer)
        assert scorer.result().val_tokens == scorer.val.targets
        scores.append(scorer.nats[:-1])
    assert len(learnt) == steps, "nothing is learned after the limit"
    (line,) = lines
    assert "EVAL_MAX_SECONDS=1e+09 was reached after" in line
    if mode == "sgd":  # in the second chunk of 64, which was scored first
        assert f"after {100 * 128 / scorer.val.targets:.1f}% of the text" in line
    assert "the rest is scored with fixed weights" in line
    place = np.arange(scorer.val.targets)
    if mode == "lora":  # within the document
        place -= np.repeat(scorer.val.documents, np.ptp(scorer.val.spans(), axis=1))
    # Three epochs on the first chunk and one on the second
    before = torch.from_numpy(place < {"sgd": 2 * 64, "lora": steps * 8}[mode])
    same = scores[0] == scores[1]
    assert same[before].all() and not same.all(), "what was scored before the limit stays"


def test_sgd_does_not_depend_on_the_training_of_the_model(setting):
    """An artifact does not know TRAIN_SEQ_LEN, so EVAL_ONLY must not."""
    scores = []
    for length in (32, 16):
        knobs = dict(TTT_CHUNK_TOKENS=64, TTT_LR=0.1, TRAIN_SEQ_LEN=length)
        model, scorer, _ = learner(setting, "sgd", 200, **knobs)
        train_gpt.ttt_sgd(scorer)
        scores.append(scorer.nats[:-1])
    assert torch.equal(*scores)


def test_sgd_of_one_chunk_says_that_it_learns_nothing(setting):
    model, scorer, lines = learner(setting, targets=64, TTT_CHUNK_TOKENS=64)
    before = weights_of(model)
    train_gpt.ttt_sgd(scorer)
    assert "TTT_CHUNK_TOKENS=64 covers the whole text of 64 targets" in lines[0]
    assert all(torch.equal(w, before[name]) for name, w in weights_of(model).items())
    model, scorer, lines = learner(setting, targets=65, TTT_CHUNK_TOKENS=64)
    train_gpt.ttt_sgd(scorer)
    assert not lines


def adapter_of(hp, documents: int, size=0.0) -> train_gpt.Adapter:
    """The adapter that each of these documents begins with, plus random numbers of this size."""
    generator, adapter = torch.Generator().manual_seed(3), {}
    for name, factor in train_gpt.lora_adapter(hp, torch.device("cpu")).items():
        copies = factor.repeat(documents, 1, 1, 1)
        copies += size * torch.randn(copies.shape, generator=generator)
        adapter[name] = copies.requires_grad_()
    return adapter


ALL_TARGETS = {"TTT_LORA_TARGETS": ",".join(train_gpt.LORA_TARGETS)}


@pytest.mark.parametrize("n", [24, 5])
def test_an_adapter_is_a_change_of_the_weights(one_rank, n):
    """Each row of a batch has its own: as if matrices were W + (alpha / rank) B A. Those beside
    attention and MLP are compared with published losses (tests/test_conformance.py)."""
    hp, runtime = one_rank(TTT_LORA_RANK=6, TTT_LORA_ALPHA=9, **ALL_TARGETS, MLP_GATE=1)
    model = noise(made(hp, runtime.attend))
    ids = torch.randint(1, hp.vocab_size, (2, 25), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1], ids[:, 25 - n :]
    with torch.no_grad():
        plain, matrices = model(x, y, "none"), model.matrices()
        assert torch.equal(model(x, y, "none", adapter=adapter_of(hp, 2)), plain), "B is zero"
        adapter = adapter_of(hp, 2, 0.2)
        together = model(x, y, "none", adapter=adapter)
        for name in adapter:  # each of them matters
            other = model(x, y, "none", adapter={**adapter, name: 0 * adapter[name]})
            assert (other - together).abs().max() > 0.01
        for name in ("out.b", "mlp.b"):
            adapter[name].zero_()
        together = model(x, y, "none", adapter=adapter)
        for row in range(2):
            changed = dict(matrices)
            for name in ("q", "k", "v", "head"):
                change = 1.5 * adapter[f"{name}.b"][row] @ adapter[f"{name}.a"][row]
                if name == "head":
                    changed["tok_emb"] = matrices["tok_emb"] + change
                else:
                    changed[name] = matrices[name] + model.layer_scale * change
            with mock.patch.object(model, "matrices", lambda qat, changed=changed: changed):
                alone = model(x[row : row + 1], y[row : row + 1], "none")
            torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-4)


def lora_documents(scorer, spans, rows=1) -> train_gpt.Adapter:
    """Score these documents in one batch. Returns the mean of each A."""
    scorer.val.spans = lambda: np.array(spans)
    states, make = [], train_gpt.LoraState
    noted = lambda *arguments: states.append(make(*arguments)) or states[0]  # noqa: E731
    with mock.patch.multiple(train_gpt, LORA_ROWS=(rows, rows), LoraState=noted):
        train_gpt.ttt_lora(scorer)
    factors = {name: f for name, f in states[0].factors.items() if name.endswith(".a")}
    return {name: f[: len(spans)].mean(dim=0, keepdim=True) for name, f in factors.items()}


@pytest.mark.parametrize("end", [242, 240])
def test_low_rank_training_by_hand(setting, end, monkeypatch):
    """One document: score a chunk, one AdamW step on its mean loss, score the next. No gradient
    sees another chunk, and nothing is learned from the last, whether it is full or not. A larger
    epsilon keeps Adam from making a whole step of a gradient that is zero but for rounding."""
    monkeypatch.setattr(train_gpt, "LORA_EPS", 1e-6)
    model, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02)
    hp, tokens = scorer.hp, scorer.val.tokens.long()
    after = lora_documents(scorer, [[200, end]])
    adapter = adapter_of(hp, 1)
    how = dict(lr=0.02, betas=(0.0, 0.99), eps=1e-6, weight_decay=0.5)
    adam = torch.optim.AdamW(adapter.values(), **how)
    for first in range(200, end, 8):
        stop = min(first + 8, end)
        begin = max(200, first + 8 - hp.eval_seq_len)  # windows of 32 tokens
        x, y = tokens[begin:stop], tokens[begin + 1 : stop + 1]
        nats = model(x[None], y[None], "none", adapter=adapter)[0, first - begin :]
        torch.testing.assert_close(scorer.nats[first:stop], nats.detach(), rtol=1e-4, atol=1e-4)
        if stop < end:
            adam.zero_grad()
            nats.mean().backward(inputs=list(adapter.values()))
            adam.step()
    assert (~scorer.nats[:-1].isnan()).sum() == end - 200
    for name, factor in after.items():
        torch.testing.assert_close(factor, adapter[name].detach(), rtol=1e-3, atol=5e-4)


def test_rows_of_a_forward_change_nothing(setting, monkeypatch):
    """Documents side by side see neither the others' text nor their end."""
    monkeypatch.setattr(train_gpt, "LORA_EPS", 1e-3)
    spans = [[9, 10], [10, 17], [17, 41], [41, 90], [90, 150]]
    results = []
    for rows in (1, 2, 3, 5):
        _, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02)
        after = lora_documents(scorer, spans, rows).values()
        results.append(torch.cat([scorer.nats[9:150], *(factor.flatten() for factor in after)]))
        assert (~scorer.nats[:-1].isnan()).sum() == 141
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)


def test_a_batch_begins_with_the_mean_of_the_one_before(setting, monkeypatch):
    """In the order of the stream; B begins at zero."""
    monkeypatch.setattr(train_gpt, "LORA_BATCH", 2)
    model, scorer, _ = learner(setting, "lora", 500, TTT_LORA_LR=0.02)
    scorer.val.documents = np.arange(0, 500, 100)  # 5, in three batches
    begin, batches = train_gpt.LoraState, []

    def noted(spans, first):
        batches.append((dict(first), begin(spans, first)))
        return batches[-1][1]

    monkeypatch.setattr(train_gpt, "LoraState", noted)
    train_gpt.ttt_lora(scorer)
    assert [state.spans[:, 0].tolist() for _, state in batches] == [[0, 100], [200, 300], [400]]
    fresh = train_gpt.lora_adapter(scorer.hp, torch.device("cpu"))
    for number, (first, _) in enumerate(batches):
        for name, factor in first.items():
            expected = fresh[name]
            if number and name.endswith(".a"):
                ends = batches[number - 1][1].factors[name]
                expected = ((ends[0] + ends[1]) / 2)[None]
                assert not torch.equal(expected, fresh[name])
            torch.testing.assert_close(factor, expected)


def test_documents_are_dealt_to_the_ranks(setting, monkeypatch):
    """Each document is scored once, on one rank, as that rank would score its documents alone."""
    monkeypatch.setattr(train_gpt, "LORA_BATCH", 2)
    for size in (1, 2, 6):  # of 6 ranks one has nothing
        for rank in range(size):
            model, scorer, _ = learner(setting, "lora", 200, TTT_LORA_LR=0.02)
            scorer.val.documents = np.arange(0, 200, 40)
            scorer.runtime = dataclasses.replace(scorer.runtime, comm=Comm(rank, size))
            train_gpt.ttt_lora(scorer)
            scored = ~scorer.nats[:-1].isnan()
            owner = torch.arange(200) // 40 % size
            assert torch.equal(scored, owner == rank) and scorer.count == scored.sum()


# As compile_whole sets it; monkeypatch would delete it afterwards


@pytest.mark.parametrize("limit, sizes", [(48, {8, 24, 48}), (10, {8, 10}), (5, {5})])
def test_chunks_follow_from_the_position(hyperparameters, limit, sizes):
    """Short ones at the start of a document, at most TTT_LORA_CHUNK, whatever its length."""
    hp = hyperparameters(TTT_LORA_CHUNK=limit, EVAL_SEQ_LEN=64)
    whole = list(train_gpt.lora_chunks(hp, 5000))
    # One behind the other
    assert whole[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(whole))
    assert {stop - begin for begin, stop in whole} == sizes
    for begin, stop in whole:
        assert stop - begin == min(limit, 8 if begin < 256 else 24 if begin < 2000 else 48)
    for length in (1, 7, 8, 9, 255, 256, 257, 1999, 2000, 2024, 4999):
        chunks = list(train_gpt.lora_chunks(hp, length))
        assert chunks == whole[: len(chunks)] and chunks[-1][0] < length <= chunks[-1][1]


def test_the_row_of_a_document_follows_from_those_before_it(setting):
    """Those that go on move up: a document's place does not depend on later ones."""
    _, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02)
    groups, batch = [], scorer.batch
    spans = [[0, 4], [4, 44], [44, 48], [48, 84]]

    def noted(position, n, scored, stop, adapter):
        begins = [begin for begin, _ in spans]
        first = scored[scored < stop].numpy()
        groups.append((np.searchsorted(begins, first, side="right") - 1).tolist())
        return batch(position, n, scored, stop, adapter)

    scorer.batch = noted
    shapes = noting_shapes(scorer.forward)
    lora_documents(scorer, spans, rows=2)
    assert groups == [[0, 1], [2, 3]] + [[1, 3]] * 4
    assert {shape[0] for shape in shapes} == {2}, "always as many rows"
