"""bench/: what its programs compute beside times."""

import collections
import csv
import dataclasses
import json
import sys
import types

import pytest
import torch

import artifact
import flops
import h100
import optimizer
import scaling
import step
import train_gpt
from conftest import ROOT, run, user_error
from train_gpt import Comm, Hyperparameters


def test_flops():
    """Of a token of the record, forward and backward, counted by hand."""
    assert abs(flops.flops_per_token(Hyperparameters(), 2048) / 1e6 - 263.10) < 0.01


@pytest.mark.parametrize("window", [0, 3, 8, 40])
def test_a_window_leaves_pairs_out(window):
    """Counted one by one, in eight layers of eleven."""
    hp = Hyperparameters(attn_window=window)
    seen = lambda *limits: sum(  # noqa: E731
        0 <= i - j < min(filter(None, limits), default=99) for i in range(20) for j in range(20)
    )
    assert flops.attended(hp, 20) == 8 * seen(window) + 3 * seen()
    pairs = flops.attended(Hyperparameters(), 20) - flops.attended(hp, 20)
    saved = flops.flops_per_token(Hyperparameters(), 20) - flops.flops_per_token(hp, 20)
    assert 20 * saved == pytest.approx(3 * 4 * hp.model_dim * pairs)


def test_attention_is_priced_as_it_was_measured():
    """Forward and backward of a layer, FlashAttention 3, in docs/data/h100_attention.csv."""
    lines = (ROOT / "docs" / "data" / "h100_attention.csv").read_text().splitlines()
    for shape, measured, *_ in list(csv.reader(lines))[3:]:
        rows, n = (int(number.replace(",", "")) for number in shape.split(" of "))
        sizes = "\t".join(map(str, (rows, n, 8, 64, n, 4, n // 2)))
        log = [f"note\tattention\t{way}\t{sizes}" for way in ("forward", "backward")]
        modelled = 1e3 * sum(map(h100.seconds, h100.launches_of({"log": log, "kernels": []})))
        assert modelled == pytest.approx(float(measured), rel=0.04)


def test_the_model_of_a_collective():
    """A ring, and trees within a node and over nodes with all ranks of each or one."""
    machine = scaling.Machine(0.0, 1.0, 0.0, 8, (2.0, 5.0), (20.0, 4.0), tree=True)
    ring = machine._replace(tree=False)
    call = lambda kind, ranks: scaling.Call(kind, "all", tuple(ranks), 40)  # noqa: E731
    assert call("all_reduce", range(4)).seconds(ring) == 2 * (2 * 3 + 40 * 3 / 4 / 20)
    assert call("all_gather", range(8)).seconds(machine) == 2 * 3 + 40 * 7 / 8 / 20
    over = call("all_gather", range(16))
    # Eight cards are faster than the links of the node
    assert over.seconds(machine) == 2 * 3 + 5 + 40 * 15 / 16 / 20
    assert over.seconds(machine._replace(beta=(20.0, 1.0))) == 2 * 3 + 5 + 40 * 15 / 16 / 8
    assert call("all_reduce", (1, 9)).seconds(machine) == 2 * (5 + 40 / 2 / 4)


def test_the_streams_of_an_update():
    """Collectives queue behind each other and behind what the device had to do at their start."""
    times = {"a": 1.0, "b": 2.0, "big": 5.0, "small": 1.0}
    for line, seconds in {
        "a b": 3,
        "a >big b": 3,  # nobody waits
        "a >big b <big": 6,
        "a >big >small b <small b": 9,
        ">big >small <big a <small": 6,
    }.items():
        assert h100.finish(line.split(), times) == seconds


def test_the_picture_of_an_update(capsys):
    """Rows by rank, and a bar of 60 columns in all for the work of both streams."""
    times = {"a": 1e-6, "big": 4e-6, "b": 1e-6}
    h100.draw(Hyperparameters(), 8, h100.time_line(["a", ">big", "b", "<big", "a"], times))
    banks, bars = capsys.readouterr().out.strip().split("\n\n")
    assert "qo_bank   (22, 512, 512)  qqq qqq qqq qqo ooo ooo ooo o--" in banks
    drawn = [("a", 0, 1, "#"), ("big", 1, 5, "="), ("b", 1, 2, "#"), ("a", 5, 6, "#")]
    assert bars.splitlines()[1:] == [
        f"  {name:18}{a:6}{b:6}  {10 * a * ' '}{10 * (b - a) * sign}" for name, a, b, sign in drawn
    ]


def test_our_order_of_communication_is_that_of_the_script(hyperparameters):
    """And all orders do the same work: each collective once, after what it sends."""
    words, names = [], []

    class Noted(Comm):
        def start(self, collective, out, *source):
            name = names.pop(0)
            words.append(f">{name}")
            return lambda: words.append(f"<{name}")

    hp = hyperparameters()
    model = train_gpt.GPT(hp, None, torch.float32)
    muon = train_gpt.ParallelMuon(model, model.initialise(0), hp, Noted(0, 2))
    banks = {id(shard): f"update {bank}" for bank, shard in muon.banks.items()}
    names += [*(f"scatter {bank}" for bank in muon.banks), "small"]
    names += [f"gather {bank}" for bank in muon.banks]
    noting = lambda real, word: lambda *given: (words.append(word(*given)), real(*given))[1]  # noqa: E731
    muon.muon_update = noting(muon.muon_update, lambda shard, *_: banks[id(shard)])
    muon.update_small = noting(muon.update_small, lambda *_: "Adam")
    muon.gradient_norm = noting(muon.gradient_norm, lambda *_: "clip")
    muon.step(1.0, 0.9)
    orders = h100.orders(list(muon.banks))
    assert words == [word for word in orders["ours"] if word != "norms"]
    own = {"norms", "clip", "local", ">norm", "<norm"}  # clipping differs
    for order, line in orders.items():
        assert sorted({*line} - own) == sorted({*words} - own) and len({*line}) == len(line), order
        place = {word: line.index(word) for word in line}
        assert all(place[f">{word[1:]}"] < at for word, at in place.items() if word[0] == "<")
        for bank in muon.banks:
            chain = [f">scatter {bank}", f"<scatter {bank}", f"update {bank}", f">gather {bank}"]
            assert sorted(chain, key=place.get) == chain, order


def test_banks_and_separate_matrices_have_the_same_gradients(one_rank):
    """But for the order of sums."""
    loss, gradients = step.compare_separate(*one_rank(COMPILE="0"), 1)
    assert loss < 1e-6 and gradients < 1e-4


def test_errors_of_newton_schulz(one_rank):
    """One per matrix; those of Polar Express are smaller."""
    hp, runtime = one_rank(COMPILE="0", MUON_EQ="0")
    quintic, polar = step.measure_orthogonality(hp, runtime, 8).values()
    assert len(quintic) == len(polar) == 6 * hp.num_layers
    assert 0 < sum(polar) < sum(quintic) < 0.5 * len(quintic)


def test_modelled_seconds_of_a_part():
    """A launch takes at least 2.5 us. Operators of eager work have the bytes of their launches."""
    launch = lambda part, kind, moved: dict(part=part, kind=kind, bytes=moved, flops=0, name="")  # noqa: E731
    small, large = (h100.BANDWIDTH * h100.LAUNCH * share for share in (0.5, 4))
    work = [("triton", small), ("triton", large)]
    launches = [launch("compiled", *one) for one in work]
    work = [("library", 0), ("product", 0), ("operator", small), ("operator", large)]
    work += [("library", 0), ("operator", large)]
    found = h100.part_seconds(launches + [launch("eager", *one) for one in work])
    assert found == pytest.approx({"compiled": 5 * h100.LAUNCH, "eager": 6 * h100.LAUNCH})


# Weights in a row of each of the record's three banks, which have 22 rows
MATRICES = 512 * 512 + 256 * 512 + 2048 * 512
# Bytes of the gradients outside the banks, the squared norm of the others and the report, in fp32
SMALL = 4 * (32_597_081 - 22 * MATRICES + 1 + 3)


@pytest.mark.parametrize(
    "ranks, shard, rank, rows",
    [(8, 8, 0, 24), (64, 64, 0, 64), (1024, 1024, 0, 1024)]
    + [(16, 8, 9, 24), (1024, 8, 0, 24), (1024, 8, 1023, 24)],
)
def test_bytes_of_a_step(ranks, shard, rank, rows):
    """Banks are padded to a multiple of the ranks that share them, so traffic grows with these.
    Between nodes goes an eighth of each bank."""
    bank, inner = 2 * rows * MATRICES, "all" if ranks == shard else "shard"
    expected = {("all_reduce", "all"): SMALL, ("reduce_scatter", inner): bank}
    expected |= {("all_gather", inner): bank}
    expected |= {("all_reduce", "replicate"): bank / 8} if ranks > shard else {}
    node = rank // shard * shard
    members = {"all": range(ranks), "shard": range(node, node + shard)}
    members["replicate"] = range(rank % shard, ranks, shard)
    found = collections.Counter()
    for call in scaling.count(Hyperparameters(), ranks, shard, rank=rank).calls:
        found[call.kind, call.group] += call.nbytes
        assert call.ranks == tuple(members[call.group])
    assert found == expected


def test_the_first_window_is_a_batch_of_one_chunk_only():
    """`--work ttt_sgd` charges all chunks as the second one."""
    seconds = {"first windows": 5, "passes": 2, "windows": 3}
    given = {"kind": "library", "name": "", "flops": 0}
    launches = [given | {"part": p, "bytes": s * h100.BANDWIDTH} for p, s in seconds.items()]
    found = {"facts": {"ttt_chunk": h100.CHALLENGE_TOKENS // 4 + 1}}
    options = {"work": "ttt_sgd", "ranks": 8}
    assert h100.extrapolate(options, found, launches) == {"challenge_seconds": 4 * 5.0}


def test_ranks_that_cannot_share_a_batch(hyperparameters):
    """The model leaves out the ranks that the loader refuses."""
    hp = hyperparameters()
    worlds = (1, 8, 24, 16, 48)  # the last two have 1.5 and 0.5 sequences per rank
    assert [scaling.sequences(hp, ranks) for ranks in worlds] == [24, 3, 1, 0, 0]
    for ranks in worlds[3:]:
        runtime = types.SimpleNamespace(comm=Comm(0, ranks), device="cpu", attention="sdpa")
        with user_error(f"so {ranks} ranks cannot share its sequences evenly"):
            train_gpt.TrainingLoader(hp, runtime)


def test_curves_are_printed_and_drawn(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scaling, "WORLDS", [1, 16])
    drawn = tmp_path / "s.png"
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--plot", str(drawn), "--network", "1.6"])
    scaling.main()
    out = capsys.readouterr().out
    assert "between nodes 20 us and 1.6 GB/s" in out and drawn.stat().st_size > 10_000
    found = json.loads(out.splitlines()[-1])["modelled"]
    rows = {kind: [(row["ranks"], row["tokens"]) for row in found[kind]] for kind in found}
    assert rows["weak"] == [(1, scaling.SHARE), (16, scaling.SHARE)]
    assert rows["fixed"] == [(1, 786_432), (16, 49_152), (384, 2048)]


class Peers(Comm):
    """One of the ranks of a group that all have the same gradients. It moves only its own rows."""

    calls = collections.Counter()

    def start(self, collective, out, *source):
        self.calls[collective.__name__[:10]] += self.size > 1
        if not source:
            out.mul_(self.size)
        elif len(source[0]) == self.size * len(out):
            out.copy_(self.size * source[0].chunk(self.size)[self.rank])
        else:
            out.chunk(self.size)[self.rank].copy_(source[0])
        return lambda: None


@pytest.mark.parametrize("ranks", [1, 2])
@torch.no_grad()
def test_the_ways_to_update_agree(ranks, hyperparameters, monkeypatch):
    """In fp32 they are one mathematics, but for MuonEq-R. Of two ranks each has its rows."""
    monkeypatch.setattr(optimizer, "Comm", Peers)
    hp = hyperparameters(MUON_EQ=0, GRAD_CLIP_NORM=0)
    alone = train_gpt.Runtime(Comm(), torch.device("cpu"), torch.float32, False, 1024)
    start = optimizer.matrices(optimizer.random_banks(hp, alone.device)[0])
    reference = optimizer.Separate(hp, alone, alone.comm)
    reference.step()
    reference.step()
    found = collections.defaultdict(lambda: [set() for _ in start])
    for rank in range(ranks):
        runtime = dataclasses.replace(alone, comm=Peers(rank, ranks))
        for name, way in optimizer.updates(hp, runtime, separate=ranks == 1).items():
            Peers.calls.clear()
            way.step()
            way.step()
            if name == "ours, all-reduced":  # three banks and the small gradients
                assert +Peers.calls == {"all_reduce": 2 * 4}
            ours = isinstance(way, optimizer.Ours)
            weights = optimizer.matrices(way.optimizer.weights()) if ours else way.weights
            weights = [one for w in weights for one in w.view(-1, *w.shape[-2:])]
            rows = zip(found[name], start, reference.weights, weights, strict=True)
            for errors, before, expected, weight in rows:
                error = (weight - expected).norm() / (expected - before).norm()
                # Rows of the other rank are what was in the memory
                errors.add(float(error.nan_to_num(nan=1e9)))
    worst = {name: max(map(min, errors)) for name, errors in found.items()}
    assert worst.pop("ours, MuonEq-R") > 0.01
    assert len(worst) == (5 if ranks == 1 else 3) and max(worst.values()) < 2e-4, worst


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ways_to_update_are_timed(ranks, env, tmp_path):
    """With the update's own rows on one rank, and with communication on several."""
    program = [ROOT / "bench" / "optimizer.py", "--rounds", 3]
    out = run(program, env(), tmp_path, ranks).stdout
    rows = json.loads(out.splitlines()[-1])["update"]
    assert out.count("torch 2") == 1, "rank 0 prints"
    names = {row["variant"] for row in rows}
    assert ("ours, all-reduced" in names, "one call each" in names) == (ranks == 2, ranks == 1)
    for row in rows:
        assert 0 < row["min"] <= row["ratio"] <= row["max"] and row["median_ms"] > 0


def test_coders_restore_the_codes(swept, capsys):
    artifact.compare_coders(str(min((swept / "logs").glob("*.npz"))))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["variant"] for row in found["coders"]] == [*train_gpt.CODERS, "#399"]
    assert all(row["ratio"] == row["bytes"] / found["entropy_bytes"] for row in found["coders"])


@pytest.mark.parametrize("program", ["step", "eval"])
def test_another_version_of_the_script_is_compared(program, env, tmp_path):
    """Here the other version is a copy of this one, so both evaluations give the same loss."""
    (tmp_path / "other.py").write_bytes((ROOT / "train_gpt.py").read_bytes())
    options = ["--against", tmp_path / "other.py", "--rounds", 2]
    options += ["--windows", 8] if program == "eval" else []
    result = run([ROOT / "bench" / f"{program}.py", *options], env(), tmp_path)
    other, this = json.loads(result.stdout.splitlines()[-1])["against"]
    assert (other["variant"], other["ratio"]) == (str(tmp_path / "other.py"), 1.0)
    assert this["median_ms"] > 0 and this["ratio"] > 0
    assert this.get("nats") == other.get("nats")
