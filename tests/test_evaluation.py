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
from conftest import PARTS, evaluator, made, noise, user_error, weights_of
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


def parts_of_ranks(size, forward, val, hp, runtime, stride) -> list[train_gpt.Evaluator]:
    """The evaluators of so many ranks, each after its share of the windows."""
    comms = [Comm(rank, size) for rank in range(size)]
    shared = [dataclasses.replace(runtime, comm=comm) for comm in comms]
    scorers = [evaluator(forward, val, hp, each, stride) for each in shared]
    for scorer in scorers:
        scorer.score_windows()
    return scorers


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (32, 1), (32, 31), (48, 7), (4, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("targets", [48, 49, 111, 240])
def test_every_target_is_scored_once(setting, window, stride, size, targets):
    """Faults B8, B8b, B24: #399 counts the last 64 targets 32 times and drops a tail. The loss of a
    target is its number, from 1 on."""
    blocks = {} if stride else {"MICRO_BATCH_TOKENS": 36}  # of a banded pass, which score 20
    hp, runtime, val = setting(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride or window, **blocks)
    val.tokens = torch.arange(targets + 1, dtype=torch.int32)
    val.targets, number = targets, lambda x, y, *_, **__: y.float()
    scorers = parts_of_ranks(size, number, val, hp, runtime, stride)
    assert sum(scorer.count for scorer in scorers) == targets
    together = sum(each.nats[:-1].nan_to_num(0) for each in scorers)
    assert torch.equal(together, val.tokens[1:].float())


def test_every_target_needs_one_finite_loss(setting):
    """The last window is left out or scored twice (C4), or the weights are damaged."""
    hp, runtime, val = setting()
    every = val.targets
    for change, bad in ((-1, 0), (1, 0), (0, 1), (0, every)):
        scorer = evaluator(lambda x, y, *_, **__: torch.zeros(y.shape), val, hp, runtime, 8)
        windows = scorer.windows()
        places = [*range(windows.shape[1]), -1]
        scorer.score(windows[:, places[: windows.shape[1] + change]])
        scorer.nats[:bad] = math.inf if bad == 1 else math.nan
        if bad:
            with user_error(f"{bad} of {every} validation losses are not finite: the weights are"):
                scorer.result()
            continue
        visited = every + change * (windows[2, -1] - windows[1, -1])
        scored = f"scored {min(visited, every)} of {every} targets, {visited} times"
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
    scorer.score(train_gpt.plan_windows(spans, 48, stride) if documents else scorer.windows())
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
    form = r"evaluating stride:8 done:(\S+)% eta:\d+s"
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
    hp, runtime, val, model = banded(setting, **changes)
    found = [each.nats[:-1] for each in parts_of_ranks(size, model, val, hp, runtime, 0)]
    assert (sum((~nats.isnan()).long() for nats in found) == 1).all()
    together = sum(nats.nan_to_num(0) for nats in found)
    torch.testing.assert_close(together, one_long_pass(model, hp, val.tokens), rtol=1e-5, atol=1e-5)
    (plain,) = parts_of_ranks(1, model, val, hp, runtime, 8)
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


DOCUMENTS = torch.tensor([[0] * 3 + [1] * 20 + [2] * 1 + [3] * 64, [5] * 61 + [6] * 27])  # (2, 88)


@pytest.fixture
def fa3(hopper, monkeypatch):
    """A FlashAttention 3. Its window counts the positions before the query, and it aligns the last
    query of a sequence with the last key. It has `longest`, that it was told last."""

    def fixed(q, k, v, causal=False, window_size=(-1, -1)):
        before, after = window_size
        assert causal and after in (0, -1)
        return train_gpt.reference_attention(q, k, v, before + 1), None

    def varlen(q, k, v, queries, keys, longest_q, longest_k, **options):
        module.longest = longest_k
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
    return module


@pytest.mark.parametrize("band", [0, 1, 5, 8, 64])
@pytest.mark.parametrize("time", [88, 40, 37, 5])
@pytest.mark.parametrize("name", ["reference", "plain", "sdpa", "math", "fa3"])
@pytest.mark.parametrize("document", [None, DOCUMENTS])
def test_attention_within_bands_and_documents(band, time, name, document, fa3):
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
    attend = own.get(name) or train_gpt.load_attention(name)
    if name == "fa3" and document is not None:
        document = attend.prepare(document)
    found = attend(q, k, v, band, document)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(y, inputs, grad) for y in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_flash_attention_3_is_told_how_long_a_document_can_be(fa3):
    attend, q, k = train_gpt.load_attention("fa3"), torch.ones(2, 88, 4, 8), torch.ones(2, 88, 2, 8)
    for limit, longest in ((0, 88), (64, 64), (99, 88)):
        attend(q, k, k, 0, attend.prepare(DOCUMENTS), limit)
        assert fa3.longest == longest
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        attend.prepare(torch.arange(88).expand(2, 88))


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
    monkeypatch.setattr(Comm, "all_reduce", lambda *_: lambda: None)
    monkeypatch.setattr(Comm, "gather", lambda _, value: [value])
    monkeypatch.setattr(Comm, "broadcast", lambda _, value: value)
    for rank in range(size):
        over = lambda *_, asked=itertools.count(): limit > 0 and next(asked) >= 3  # noqa: B008, E731
        monkeypatch.setattr(train_gpt, "out_of_time", over)
        runtime, shapes = dataclasses.replace(runtime, comm=Comm(rank, size)), noting_shapes(model)
        make_scorer = functools.partial(train_gpt.Evaluator, model, val, hp, runtime)
        train_gpt.warm_up_evaluation(make_scorer, train_gpt.final_passes(hp), mock.Mock())
        warm = set(shapes)
        shapes.clear()
        assert all(torch.equal(w, before[name]) for name, w in weights_of(model).items())
        assert all(parameter.requires_grad for parameter in model.parameters())
        for config, stride, score, _ in train_gpt.final_passes(hp).values():
            score(make_scorer(config, stride))
        model.load_state_dict(before)
        assert shapes <= warm, "a graph compiles in a timed evaluation"
        assert shapes == warm or size > 1 or limit, "a graph that nothing uses"
        assert bool(training) == any(trained or adapter for *_, adapter, trained, _ in shapes)


@pytest.mark.parametrize("mode, band, stride", [("sliding", 0, 32), ("banded", 32, 32 * 64)])
def test_every_score_loops(hyperparameters, mode, band, stride):
    """But for a validation before the layers loop, which is like the score: banded, or with windows
    that do not overlap, as sliding ones are too dear for it."""
    hp = hyperparameters(**PARTS, EVAL_MODE=mode, TTT_ENABLED=1)
    ways = [*train_gpt.final_passes(hp).values(), train_gpt.validation_pass(hp)]
    assert len(ways) == 4 and (ways[-1].config.band, ways[-1].stride) == (band, stride)
    assert {way.config.layer_order for way in ways} == {(0, 1, 2, 1, 2, 1, 2, 3, 4)}
    before = train_gpt.validation_pass(hp, looping=False)
    assert before.config.layer_order == (0, 1, 2, 3, 4)


# ---- Test-time training --------------------------------------------------------------------------
def learner(setting, mode="sgd", targets=0, **changes):
    """(model, evaluator, lines that it logs) for the whole text or its first targets."""
    knobs = dict(TTT_ENABLED=1, TTT_MODE=mode, TTT_LORA_CHUNK=8)
    hp, runtime, val, model = several_documents(setting, **knobs, **changes)
    if targets:
        shorten(val, targets)
    scorer, lines = evaluator(model, val, hp, runtime, hp.eval_stride), []
    scorer.log = lambda line, **_: lines.append(line)
    scorer.reported = math.inf  # no lines of progress, which a slow machine has
    return model, scorer, lines


def test_sgd_by_the_recipe_of_461(setting):
    """By hand, with one momentum and a cosine of rates over the chunks that train. TRAIN_SEQ_LEN
    changes nothing."""
    chunk, knobs = 64, dict(TTT_CHUNK_TOKENS=64, TTT_LR=0.05, TRAIN_SEQ_LEN=16)
    model, scorer, _ = learner(setting, "sgd", 250, **knobs)
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
def test_a_gradient_is_the_mean_over_all_ranks(setting, size, monkeypatch):
    """Before it is clipped, by the compiled forward. Of three sequences, a fourth rank has none."""
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=96)
    parameters = {"parameters": model.parameters, "named_parameters": model.named_parameters}
    scorer.forward = mock.Mock(side_effect=model, **parameters)
    x = scorer.val.tokens[64:161].long()
    model(x[:-1].view(3, 32), x[1:].view(3, 32)).backward()
    expected, shares = torch.cat([p.grad.flatten() for p in model.parameters()]), []
    summed = lambda _, share: lambda: shares.append(share.clone())  # noqa: E731
    monkeypatch.setattr(Comm, "all_reduce", summed)
    for rank in range(size):
        scorer.runtime = dataclasses.replace(scorer.runtime, comm=Comm(rank, size))
        train_gpt.sgd_gradients(scorer, 64)
    assert scorer.forward.call_count == min(size, 3)
    torch.testing.assert_close(sum(shares), expected, rtol=1e-4, atol=1e-6)


def test_chunks_are_slices_of_the_windows(setting, monkeypatch):
    """A search among all windows for each chunk took minutes."""
    monkeypatch.setattr(train_gpt, "TTT_EPOCHS", 0)
    _, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=64)
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
    train = {"sgd": train_gpt.ttt_sgd, "lora": train_gpt.ttt_lora}[mode]
    update = {"sgd": "sgd_gradients", "lora": "lora_update"}[mode]
    knobs = dict(EVAL_MAX_SECONDS=1e9, TTT_CHUNK_TOKENS=64, TTT_LR=0.1, TTT_LORA_LR=0.02)
    (_, free, _), (_, limited, lines) = (learner(setting, mode, 500, **knobs) for _ in range(2))
    train(free)
    asked, learnt = itertools.count(), mock.Mock(side_effect=getattr(train_gpt, update))
    own = lambda _: "of this rank" if mode == "sgd" else next(asked) >= steps  # noqa: E731
    decided = lambda _, late: late == "of this rank" and next(asked) >= steps  # noqa: E731
    monkeypatch.setattr(train_gpt, "out_of_time", own)
    monkeypatch.setattr(Comm, "broadcast", decided)
    monkeypatch.setattr(train_gpt, update, learnt)
    train(limited)
    assert learnt.call_count == steps, "nothing is learned after the limit"
    assert free.result().val_tokens == limited.result().val_tokens
    share = "74.4%" if mode == "sgd" else ".*%"  # the second chunk of 64 was scored first
    over = f"ttt: EVAL_MAX_SECONDS are over: {share} of the text has fixed weights"
    assert len(lines) == 1 and re.fullmatch(over, lines[0])
    place = np.arange(500)
    if mode == "lora":  # within the document
        place -= np.repeat(free.val.documents, np.ptp(free.val.spans(), axis=1))
    # Three epochs on the first chunk and one on the second
    before = torch.from_numpy(place < {"sgd": 2 * 64, "lora": steps * 8}[mode])
    same = (free.nats == limited.nats)[:-1]
    assert same[before].all() and not same.all(), "what was scored before the limit stays"


def test_sgd_of_one_chunk_learns_nothing(setting):
    model, scorer, _ = learner(setting, targets=64, TTT_CHUNK_TOKENS=64)
    before = weights_of(model)
    train_gpt.ttt_sgd(scorer)
    assert all(torch.equal(w, before[name]) for name, w in weights_of(model).items())


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
    adapter = train_gpt.lora_adapter(hp, torch.device("cpu"))
    factors = [factor.requires_grad_() for factor in adapter.values()]
    adam = torch.optim.AdamW(factors, lr=0.02, betas=(0.0, 0.99), eps=1e-6, weight_decay=0.5)
    for first in range(200, end, 8):
        stop = min(first + 8, end)
        begin = max(200, first + 8 - hp.eval_seq_len)  # windows of 32 tokens
        x, y = tokens[begin:stop], tokens[begin + 1 : stop + 1]
        nats = model(x[None], y[None], "none", adapter=adapter)[0, first - begin :]
        torch.testing.assert_close(scorer.nats[first:stop], nats.detach(), rtol=1e-4, atol=1e-4)
        if stop < end:
            adam.zero_grad()
            nats.mean().backward(inputs=factors)
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


@pytest.mark.parametrize("limit", [48, 10, 5])
def test_chunks_follow_from_the_position(hyperparameters, limit):
    """Short ones at the start of a document, at most TTT_LORA_CHUNK, whatever its length."""
    hp, end, expected = hyperparameters(TTT_LORA_CHUNK=limit, EVAL_SEQ_LEN=64), 0, []
    while end < 5000:
        begin, end = end, end + min(limit, 8 if end < 256 else 24 if end < 2000 else 48)
        expected.append((begin, end))
    for length in (1, 7, 8, 9, 255, 256, 257, 1999, 2000, 2024, 4999, 5000):
        needed = sum(begin < length for begin, _ in expected)
        assert list(train_gpt.lora_chunks(hp, length)) == expected[:needed]


def test_the_row_of_a_document_follows_from_those_before_it(setting):
    """Those that go on move up: a document's place does not depend on later ones. There are always
    as many rows."""
    _, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02)
    groups, batch, spans = [], scorer.batch, [[0, 4], [4, 44], [44, 48], [48, 84]]

    def noted(position, n, scored, stop, adapter):
        assert len(position) == 2
        first = scored[scored < stop].numpy()
        groups.append((np.searchsorted([0, 4, 44, 48], first, side="right") - 1).tolist())
        return batch(position, n, scored, stop, adapter)

    scorer.batch = noted
    lora_documents(scorer, spans, rows=2)
    assert groups == [[0, 1], [2, 3]] + [[1, 3]] * 4
