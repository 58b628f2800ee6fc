"""Every target is scored exactly once with any windows, and the score is nats and bytes and nothing else."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt
from conftest import PARTS, made, noise, weights_of
from train_gpt import Comm, Validation, evaluate


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
    """Faults B8, B8b, B24: #399 counts the last 64 targets 32 times and drops a tail that depends on the window.

    The model is replaced by a function whose loss at target j is one bit of j. Eight such sums show whether a target is
    missing or counted twice.
    """
    hp, runtime, val = setting(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride)
    val.tokens, val.nbytes = torch.arange(targets + 1, dtype=torch.int32), torch.ones(targets, dtype=torch.int16)
    val.targets = val.total_bytes = targets
    for bit in range(8):
        total = 0.0
        for rank in range(size):
            shared = dataclasses.replace(runtime, comm=OneRank(rank, size))
            with pytest.raises(OneRank.Caught) as caught:
                evaluate(lambda x, y, reduction, bit=bit: ((y - 1) >> bit & 1).float(), val, hp, shared, stride)
            total += caught.value.args[0][0].item()
        assert total == sum(j >> bit & 1 for j in range(targets))


class OneRank(Comm):
    """One of several ranks, alone in this process. Its sum is raised as an exception instead of being shared."""

    class Caught(Exception):
        pass

    def all_reduce(self, tensor):
        raise self.Caught(tensor)


def test_context_of_sliding_windows(setting):
    """Each scored target outside the first window has at least T - stride tokens before it in its window."""
    hp, runtime, val = setting()
    val.tokens = torch.arange(val.targets + 1, dtype=torch.int32)  # each token is its position
    context = evaluate(lambda x, y, reduction: (y - x[:, :1]).float(), val, hp, runtime, 8).nats * val.targets
    window = hp.eval_seq_len
    expected = sum(j + 1 if j < window else window - 8 + 1 + (j - window) % 8 for j in range(val.targets))
    assert context == expected


def test_bits_per_byte_are_nats_over_bytes(setting):
    """Fault D2: in #399 a field called val_loss holds bits per byte."""
    hp, runtime, val = setting()
    score = evaluate(lambda x, y, reduction: torch.full(y.shape, 2.0), val, hp, runtime, 32)
    assert score.nats == pytest.approx(2.0)
    assert score.bits_per_byte == pytest.approx(2.0 / math.log(2) * val.targets / val.total_bytes)
    lines = []
    score.log(lambda line, **fields: lines.append((line, fields)), "name")
    (line, fields), result = lines[0], f"val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f}"
    assert line.startswith(f"name {result} eval_time:")
    assert (fields["val_loss"], fields["val_bpb"]) == (score.nats, score.bits_per_byte)


def test_score_does_not_depend_on_the_batch(setting):
    hp, runtime, val = setting()
    model = made(hp, runtime.attend)
    batches = [dataclasses.replace(hp, val_batch_size=size) for size in (32, 96, 1024)]
    scores = [evaluate(model, val, batch, runtime, 8).nats for batch in batches]
    assert max(scores) - min(scores) < 1e-6


def test_sliding_score_is_the_plain_sum(setting):
    """Against a Python loop over the targets, and one over the windows."""
    hp, runtime, val = setting()
    model = made(hp, runtime.attend)
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
        evaluate(lambda x, y, reduction: torch.zeros(y.shape), val, hp, runtime, 8)


def test_long_windows_do_not_break_the_model(setting):
    """Windows longer than the training sequences use the same rotary frequencies."""
    hp, runtime, val = setting(EVAL_SEQ_LEN=128, EVAL_STRIDE=64)
    model = made(hp, runtime.attend)
    assert math.isfinite(evaluate(model, val, hp, runtime, 64).nats)
    assert model.cos.size(0) == 128


# Windows, documents, and the last layer, which only computes what is scored


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (32, 5), (64, 1)])
def test_windows_cover_every_span_once(window, stride):
    spans = np.array([[0, 3], [3, 35], [35, 36], [36, 200], [200, 232], [232, 265]])
    starts, firsts, stops = train_gpt.plan_windows(spans, window, stride)
    scored = np.concatenate([np.arange(a, b) for a, b in zip(firsts, stops, strict=True)])
    assert sorted(scored) == list(range(265))
    for start, first, stop in zip(starts, firsts, stops, strict=True):
        begin, end = next((a, b) for a, b in spans if a <= start < b)
        assert begin <= start <= first < stop <= min(end, start + window), "no window crosses the border of a span"
        assert start == begin or first - start == window - stride, "all windows but the first have context"


@pytest.mark.parametrize("n", [1, 5, 23, 24])
@pytest.mark.parametrize(
    "changes", [{}, {"XSA_LAST_N": 0, "NUM_KV_HEADS": 4}, {"NUM_LAYERS": 1, "XSA_LAST_N": 1}, PARTS]
)
def test_fewer_targets_are_the_last_positions(one_rank, n, changes):
    hp, runtime = one_rank(**changes)
    model = noise(made(hp, runtime.attend))
    with torch.no_grad():
        ids = torch.randint(1, hp.vocab_size, (3, 25), generator=torch.Generator().manual_seed(2))
        whole = model(ids[:, :-1], ids[:, 1:], "none")
        end = model(ids[:, :-1], ids[:, -n:], "none")
    assert end.shape == (3, n)
    torch.testing.assert_close(end, whole[:, -n:], rtol=1e-5, atol=1e-5)


def test_unscored_positions_skip_most_of_the_last_layer(one_rank):
    """There, only keys and values are computed for all positions."""
    hp, runtime = one_rank()
    model = made(hp, runtime.attend)
    shapes, real = [], train_gpt.F.linear
    ids = torch.ones(2, 24, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.F, "linear", lambda x, w: shapes.append((x.size(1), tuple(w.shape))) or real(x, w))
        model(ids, ids[:, -4:], "none")
    # The bigram projection first, the head last; q, k and v are one product where all positions are computed.
    assert [time for time, _ in shapes] == [24] + [24] * 4 + [24] * 4 + [4, 24, 4, 4, 4] + [4]
    assert shapes[1][1] == (hp.model_dim + 2 * hp.num_kv_heads * hp.head_dim, hp.model_dim)
    assert shapes[-1] == (4, (hp.vocab_size, hp.model_dim))


def several_documents(setting, **changes):
    """(hyperparameters, runtime, validation stream with further BOS, random model)."""
    hp, runtime, val = setting(**changes)
    val.tokens = val.tokens.clone()
    val.tokens[[9, 10, 90, 150, 391]] = train_gpt.BOS
    val.documents = np.union1d(val.documents, [9, 10, 90, 150, 391])
    return hp, runtime, val, noise(made(hp, runtime.attend))


@pytest.mark.parametrize("stride", [32, 8])
def test_documents_are_scored_as_if_each_were_alone(setting, stride):
    hp, runtime, val, model = several_documents(setting, EVAL_DOCUMENTS=1, EVAL_STRIDE=stride)
    together = evaluate(model, val, hp, runtime, stride)
    begins = [0, *(val.tokens[1:-1] == train_gpt.BOS).nonzero().flatten().add(1).tolist(), val.targets]
    total, picked = 0.0, []
    with torch.no_grad():
        for begin, end in zip(begins, begins[1:], strict=False):
            for target in [t for t in range(begin, end) if t % 11 == 0 or end - begin < 40]:
                start = begin if target < begin + 32 else begin + -(-(target + 1 - begin - 32) // stride) * stride
                ids = val.tokens[start : target + 1][None].long()
                total += -model(ids)[0, -1].log_softmax(-1)[int(val.tokens[target + 1])].item()
                picked.append(target)
    evaluator = train_gpt.Evaluator(model, val, hp, runtime, stride)
    evaluator.score(train_gpt.plan_windows(val.spans(True), 32, stride))
    assert evaluator.nats[picked].double().sum().item() == pytest.approx(total, rel=1e-5)
    assert together.targets == val.targets and together.nbytes == val.total_bytes
    assert together.nats == pytest.approx(evaluator.nats[:-1].double().mean().item(), rel=1e-9)
    packed = evaluate(model, val, dataclasses.replace(hp, eval_documents=False), runtime, stride)
    assert packed.nats != together.nats


def test_shapes_are_few_and_known(setting):
    """All batches of a width have the same shape, also the last one, so a compiled forward is compiled once for it."""
    for documents, widths in ((0, {(32, 32), (32, 8)}), (1, None)):
        hp, runtime, val, model = several_documents(setting, EVAL_DOCUMENTS=documents)
        seen = set()

        def forward(ids, targets, reduction, model=model, seen=seen):
            seen.add((*ids.shape, targets.size(1)))
            return model(ids, targets, reduction)

        evaluate(forward, val, hp, runtime, 8)
        assert len(seen) == len({shape[1:] for shape in seen}), "one number of rows for each width"
        assert widths is None or {shape[1:] for shape in seen} == widths


def test_ctrl_c_leaves_a_partial_result(setting):
    hp, runtime, val = setting()
    calls = []

    def forward(ids, targets, reduction):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return torch.full(targets.shape, 2.0)

    evaluator = train_gpt.Evaluator(forward, val, hp, runtime, 8)
    with pytest.raises(KeyboardInterrupt):
        evaluator.score(evaluator.windows())
    score = evaluator.result(complete=False)
    assert 0 < score.targets < val.targets and score.nats == 2.0
    assert score.nbytes == int(val.nbytes[: score.targets].sum()), "the first targets were scored first"
    assert score.bits_per_byte == pytest.approx(2.0 / math.log(2) * score.targets / score.nbytes)


def test_progress_line(setting, monkeypatch):
    hp, runtime, val = setting()
    seconds, lines = iter(range(0, 10**6, 11)), []
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(seconds))
    evaluate(lambda ids, targets, reduction: torch.full(targets.shape, 2.0), val, hp, runtime, 8, lines.append)
    form = r"evaluating stride:8 done:(\S+)% bpb_so_far:\d+\.\d{4} eta:\d+s"
    shares = [float(re.fullmatch(form, line).group(1)) for line in lines]
    assert shares == sorted(shares) and len(shares) > 3 and shares[-1] == 100.0


def test_progress_is_of_all_ranks(setting):
    """A rank that has scored half of the text on its own means that two ranks are done."""
    hp, runtime, val = setting()
    for size, done in ((1, 0.5), (2, 1.0)):
        shared = dataclasses.replace(runtime, comm=Comm(0, size))
        evaluator = train_gpt.Evaluator(None, val, hp, shared, 8)
        half = torch.arange(val.targets // 2)
        evaluator.take(torch.ones(len(half)), half, half >= 0)
        assert evaluator.done() == pytest.approx(done, abs=0.01)


# Test-time training


TTT = {"sgd": train_gpt.ttt_sgd, "lora": train_gpt.ttt_lora}


def learner(setting, mode="sgd", **changes):
    """(model, evaluator, lines that it logs) for test-time training."""
    hp, runtime, val, model = several_documents(setting, TTT_ENABLED=1, TTT_MODE=mode, TTT_LORA_CHUNK=8, **changes)
    lines = []
    return model, train_gpt.Evaluator(model, val, hp, runtime, hp.eval_stride, lines.append), lines


@pytest.mark.parametrize("epochs, momentum", [(3, 0.9), (2, 0.5)])
def test_sgd_by_the_published_recipe(setting, epochs, momentum):
    """The first two chunks by hand: score, steps of SGD with momentum on the chunk, score."""
    chunk = 64
    knobs = {} if epochs == 3 else {"TTT_EPOCHS": epochs, "TTT_MOMENTUM": momentum}  # three and 0.9 are the defaults
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=chunk, TTT_LR=0.05, **knobs)
    hp, val = scorer.hp, scorer.val
    twin = made(hp, scorer.runtime.attend)
    twin.load_state_dict(weights_of(model))
    train_gpt.ttt_sgd(model, scorer)
    expected = train_gpt.Evaluator(twin, val, hp, scorer.runtime, 8)
    windows = train_gpt.plan_windows(val.spans(False), 32, 8)
    expected.score(windows[:, windows[1] < chunk])
    sgd = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=momentum)
    for _ in range(epochs):
        sgd.zero_grad()
        x = val.tokens[: chunk + 1].long()
        twin(x[:-1].view(-1, 32), x[1:].view(-1, 32)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        sgd.step()
    expected.score(windows[:, (windows[1] >= chunk) & (windows[1] < 2 * chunk)])
    done = ~expected.nats[:-1].isnan()
    assert done.sum() >= 2 * chunk
    torch.testing.assert_close(scorer.nats[:-1][done], expected.nats[:-1][done], rtol=1e-4, atol=1e-4)


def test_sgd_of_a_model_of_one_layer(setting):
    """It has no skips, so their gates have no gradient."""
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=64, TTT_LR=0.05, NUM_LAYERS=1, XSA_LAST_N=1)
    before = weights_of(model)
    train_gpt.ttt_sgd(model, scorer)
    assert scorer.result().targets == scorer.val.targets
    assert not torch.equal(before["qo_bank"], weights_of(model)["qo_bank"])


@pytest.mark.parametrize("documents", [0, 1])
def test_chunks_are_slices_of_the_windows(setting, documents):
    """The windows are in the order of what they score. A search among all windows for each chunk took minutes."""
    model, scorer, _ = learner(setting, TTT_CHUNK_TOKENS=64, EVAL_MAX_SECONDS=1e-9, EVAL_DOCUMENTS=documents)
    windows, parts = scorer.windows(), []
    scorer.windows, scorer.score = lambda: windows, parts.append
    train_gpt.ttt_sgd(model, scorer)
    assert len(parts) == -(-scorer.val.targets // 64)
    for number, part in enumerate(parts):
        assert np.array_equal(part, windows[:, windows[1] // 64 == number])
        assert np.shares_memory(part, windows), "a slice, not a copy of what a mask selects"


def test_sgd_compiles_two_shapes(setting):
    """The gradients use the compiled forward: full batches of 2 sequences and the rest, 1. Scores stay the same."""
    knobs = {"TTT_CHUNK_TOKENS": 160, "MICRO_BATCH_TOKENS": 64, "TTT_LR": 0.05}
    scores = []
    for compiled in (False, True):
        model, scorer, _ = learner(setting, **knobs)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        if compiled:
            scorer.forward = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
        train_gpt.ttt_sgd(model, scorer)
        scores.append(scorer.nats[:-1])
    assert counter.frame_count == 4, "windows that score all or the end, and two shapes of gradients"
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", TTT)
def test_training_on_scored_text_helps_if_the_text_repeats(setting, mode):
    model, scorer, _ = learner(setting, mode, TTT_CHUNK_TOKENS=64, TTT_LR=0.1, TTT_LORA_LR=0.02)
    tokens = scorer.val.tokens
    tokens[:] = tokens[100:116].repeat(len(tokens) // 16 + 1)[: len(tokens)]
    without = evaluate(model, scorer.val, scorer.hp, scorer.runtime, 8).nats
    TTT[mode](model, scorer)
    assert scorer.result().nats < without - 0.3


@pytest.mark.parametrize("mode", TTT)
def test_time_limit_ends_the_training_not_the_scoring(setting, mode):
    model, scorer, lines = learner(setting, mode, TTT_CHUNK_TOKENS=64, TTT_LR=0.1, EVAL_MAX_SECONDS=1e-9)
    TTT[mode](model, scorer)
    score = scorer.result()
    assert score.targets == scorer.val.targets and len(lines) == 1
    assert "EVAL_MAX_SECONDS=1e-09 was reached after" in lines[0]
    assert "the rest is scored with fixed weights" in lines[0]


def untrained_adapter(hp, documents: int) -> train_gpt.Adapter:
    """Low-rank changes that change nothing yet: random A, the same for all documents, and zero B."""
    generator, adapter = torch.Generator().manual_seed(0), {}
    for kind in [kind for kind in train_gpt.MATRICES if kind.name in ("k", "v", "out")]:
        out, into = train_gpt.matrix_shape(kind, hp)
        a = torch.randn(hp.num_layers, hp.ttt_lora_rank, into, generator=generator) / into**0.5
        b = torch.zeros(documents, hp.num_layers, out, hp.ttt_lora_rank, requires_grad=True)
        adapter[kind.name] = (a.repeat(documents, 1, 1, 1).requires_grad_(), b)
    return adapter


def test_an_adapter_is_a_change_of_the_weights(one_rank):
    """Each row of a batch has its own change: like a model whose matrices are W + B A."""
    hp, runtime = one_rank()
    model = made(hp, runtime.attend)
    ids = torch.randint(1, hp.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids)
        adapter = model.adapter = untrained_adapter(hp, 2)
        torch.testing.assert_close(model(ids), plain)
        for _, b in adapter.values():
            b.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.3)
        together = model(ids)
        for row in range(2):
            twin = made(hp, runtime.attend)
            for kind in [kind for kind in train_gpt.MATRICES if kind.name in adapter]:
                a, b = (matrix[row] for matrix in adapter[kind.name])
                # The forward folds the gain into the matrix; the change is added after it.
                gain = getattr(twin, kind.gain)[..., None] if kind.gain else 1.0
                scale = twin.layer_scale if kind.normed else 1.0
                train_gpt.bank_part(getattr(twin, kind.bank), kind).add_(b @ a / gain / scale)
            torch.testing.assert_close(together[row], twin(ids[row : row + 1])[0], rtol=1e-4, atol=1e-4)
        assert (together - plain).abs().max() > 0.1


def test_low_rank_training_by_hand(setting):
    """One document: score a chunk, one AdamW step on its mean loss, score the next. No gradient sees another chunk."""
    model, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02)
    hp, tokens = scorer.hp, scorer.val.tokens.long()
    train_gpt.lora_documents(model, scorer, np.array([[200, 221]]))
    adapter = untrained_adapter(hp, 1)
    factors = [factor for pair in adapter.values() for factor in pair]
    adam = torch.optim.AdamW(factors, lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
    model.adapter = adapter
    for first, stop in ((200, 208), (208, 216), (216, 221)):
        nats = model(tokens[200:stop][None], tokens[201 : stop + 1][None], "none")[0, first - 200 :]
        torch.testing.assert_close(scorer.nats[first:stop], nats.detach(), rtol=1e-4, atol=1e-4)
        adam.zero_grad()
        nats.mean().backward()
        adam.step()
    assert (~scorer.nats[:-1].isnan()).sum() == 21


@pytest.mark.parametrize("rank", [1, 3])
def test_rank_of_the_change(setting, rank):
    """After two steps, the change of each matrix, B A, has the rank that was asked for."""
    model, scorer, _ = learner(setting, "lora", TTT_LORA_LR=0.02, TTT_LORA_RANK=rank)
    adapters, take = [], scorer.take
    scorer.take = lambda *arguments: adapters.append(model.adapter) or take(*arguments)
    train_gpt.lora_documents(model, scorer, np.array([[200, 221]]))
    assert len(adapters) == 3 and adapters[0].keys() == {"k", "v", "out"}
    for a, b in adapters[-1].values():
        change = (b @ a).detach()[0]
        assert (torch.linalg.matrix_rank(change, rtol=1e-5) == rank).all()


def test_an_error_leaves_no_adapter_behind(setting):
    model, scorer, _ = learner(setting, "lora")
    model.attend = lambda q, k, v: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train_gpt.ttt_lora(model, scorer)
    assert not model.adapter


@pytest.mark.parametrize("mode", TTT)
def test_test_time_training_leaves_no_adapter_behind(setting, mode):
    """A model that is used again must not keep the changes of the last document."""
    model, scorer, _ = learner(setting, mode, TTT_CHUNK_TOKENS=64)
    TTT[mode](model, scorer)
    assert not model.adapter and not model.hessians and not model.qat
