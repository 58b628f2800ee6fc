"""1 to 4 ranks over gloo, on one node or several: the same mathematics, and equal replicas."""

import socket
import time

import pytest
import torch

import train_gpt
from conftest import PARTS, ROOT, made, start, user_error, weights_of, work
from train_gpt import Hyperparameters

pytestmark = pytest.mark.usefixtures("nothing_is_left_running")

# 5 layers make banks of 10 rows, which 3 and 4 ranks pad. The loop begins at step 3 of 12.
SHAPE = {**PARTS, "TRAIN_BATCH_TOKENS": 12 * 32, "MICRO_BATCH_TOKENS": 32}


@pytest.fixture(scope="module")
def one_rank_found(tmp_path_factory, env):
    folder = tmp_path_factory.mktemp("one")
    work("steps", folder, env(**SHAPE))
    return torch.load(folder / "found0.pt")


@pytest.mark.parametrize("ranks, node", [(2, 2), (3, 3), (4, 2), (4, 1)])
def test_ranks_agree_with_one_rank(ranks, node, env, tmp_path, one_rank_found):
    """Faults B4, B17, on one node of all ranks and on several. After 5 fp32 steps, sums in another
    order differ by about 1e-5 of the update. A clip by each rank's own gradient changed it by 24 to
    37 %. All ranks have the same state bit for bit, each from the owners in its own node, since all
    start from the weights of rank 0. They share the rounding and make the same artifact."""
    work("steps", tmp_path, env(**SHAPE, SHARD_RANKS=node), ranks)
    of_ranks = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(ranks)]
    assert len({each["state"] for each in of_ranks}) == 1
    assert {each["artifact"] for each in of_ranks} == {one_rank_found["artifact"]}
    shares = [each["rounded"] for each in of_ranks]
    assert sorted(sum(shares, [])) == one_rank_found["rounded"]
    assert max(map(len, shares)) < len(one_rank_found["rounded"])
    found = of_ranks[0]
    initial = weights_of(made(Hyperparameters.from_env(env(**SHAPE)), seed=1337))
    for kind in ("weights", "averages"):
        for name, expected in one_rank_found[kind].items():
            moved = (expected - initial[name]).norm()
            assert moved > 0 and (found[kind][name] - expected).norm() < 2e-4 * moved, name
    for name, expected in one_rank_found["calibration"].items():
        # The sums of random gradients are of other tokens.
        limit = 1.0 if name.endswith(".cost") else 1e-4
        change = (found["calibration"][name] - expected).norm() / expected.norm()
        assert expected.norm() > 0 and change < limit, name


@pytest.mark.parametrize("ranks, dtype", [(2, "float32"), (3, "bfloat16")])
def test_replicas_stay_equal_under_unequal_clocks(ranks, dtype, env, tmp_path):
    """Fault B5: in #399 each rank's own clock sets its rate."""
    knobs = {**SHAPE, "MICRO_BATCH_TOKENS": 384, "ITERATIONS": 100000, "COMPUTE_DTYPE": dtype}
    knobs |= {"MAX_WALLCLOCK_SECONDS": 7, "WARMDOWN_FRAC": 1.0}
    work("clocks", tmp_path, env(**knobs), ranks)
    digests = {(tmp_path / f"digest{rank}").read_text() for rank in range(ranks)}
    assert len(digests) == 1
    # The clock decides the rate of every step, so there must be several
    assert int(digests.pop().split()[1]) >= 10


def test_each_rank_ends_its_low_rank_training_in_time(env, tmp_path):
    """By its own clock, and the rest is scored once."""
    knobs = dict(TTT_ENABLED=1, TTT_MODE="lora", TTT_LORA_CHUNK=8, EVAL_MAX_SECONDS=1e6)
    work("limit", tmp_path, env(**knobs), 2)
    assert [(tmp_path / f"limit{rank}").read_text() for rank in range(2)] == ["5 True", "0 True"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_nodes(env, tmp_path):
    """Of `torchrun --nnodes=2`, each in a folder of its own. Only the first has a log and an
    artifact. The ranks of a node share the rows of the banks."""
    agents, port = [], free_port()
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        launch = f"-m torch.distributed.run --nnodes=2 --nproc_per_node=2 --node_rank={node} "
        launch += f"--rdzv_endpoint=127.0.0.1:{port} {ROOT / 'train_gpt.py'}"
        agents.append(start(launch.split(), env(RUN_ID="nodes"), folder))
    try:
        (first, errors), second = (agent.communicate(timeout=600) for agent in agents)
    finally:
        for agent in agents:
            agent.terminate()  # an agent ends its ranks
    assert [agent.returncode for agent in agents] == [0, 0], (errors, second)
    assert "ranks:4 mesh:2x2 " in first and "final_int6_sliding_window_exact" in first
    assert {p.name for p in (tmp_path / "node0").iterdir()} == {"logs", "final_model.npz"}
    assert not list((tmp_path / "node1").iterdir()) and "final" not in second[0]


@pytest.mark.parametrize("victim", [0, 3])
def test_death_of_a_rank_ends_the_others_with_a_sentence(victim, env, tmp_path):
    """Without a launcher, every rank reports it and stops, whether the dead rank was of the first
    rows or of the last. Rank 0 also served the process group's store."""
    common = dict(ITERATIONS=100000, WORLD_SIZE=4, SHARD_RANKS=2, RUN_ID="run")
    # On nodes of their own, so that none waits for the sentence of another
    common |= {"LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(4):
        folder = tmp_path / str(rank)
        folder.mkdir()
        ranks.append(start([ROOT / "train_gpt.py"], env(**common, RANK=rank), folder))
    log = tmp_path / "0" / "logs" / "run.txt"
    try:
        while not (log.exists() and "\nstep:3/" in log.read_text()):
            assert ranks[0].poll() is None
            time.sleep(0.1)
        ranks[victim].kill()
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank in {0, 1, 2, 3} - {victim}:
        assert ranks[rank].returncode == 1 and "Traceback" not in errors[rank], errors[rank]
        lost = f"error: rank {rank} lost a collective operation: another rank has died"
        assert errors[rank].strip().splitlines()[-1].startswith(lost)


def test_a_wrong_number_of_ranks_is_an_error(monkeypatch):
    """They do not fill the mesh, or are more than the node's GPUs."""
    wrong = r"SHARD_RANKS=3 \(default: LOCAL_WORLD_SIZE\) does not divide the 8 ranks: set a div"
    with user_error(wrong):
        train_gpt.Comm(0, 8).split(3, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with user_error("torch finds 1 GPUs on this node for LOCAL_RANK=1: set --nproc_per_node=1"):
        train_gpt.choose_device("auto")
