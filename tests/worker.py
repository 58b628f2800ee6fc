"""Started by the tests of several ranks, under torchrun: `worker.py MODE FOLDER`. A mode is a
function of (run, folder) or of (folder). The ranks would compute initial weights that differ in the last bits."""

import hashlib
import itertools
import math
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from conftest import evaluator, fitted


def digest(tensors) -> str:
    """The sha256 of these tensors, in hexadecimal."""
    parts = [t.detach().float().numpy().tobytes() for t in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def unequal_start() -> None:
    """As if the CPU of every rank rounded differently."""
    initialise = train_gpt.GPT.initialise

    def rounded(model, seed):
        factor = 1 + int(os.environ.get("RANK", 0)) * 1e-6
        weights = {name: weight * factor for name, weight in initialise(model, seed).items()}
        model.load_state_dict(weights)
        return weights

    train_gpt.GPT.initialise = rounded


def clocks(run: train_gpt.Run, folder: Path) -> None:
    """Updates and GPTQ under a clock that every reading advances, at a speed of the rank's own."""
    rank, readings = run.comm.rank, itertools.count(1)
    train_gpt.perf_counter = lambda: next(readings) * 0.12 * (1 + 0.5 * rank)
    run.train()
    state = digest([*run.model.parameters(), *run.calibrate(range(4)).values()])
    (folder / f"digest{rank}").write_text(f"{state} {run.clock.step} {run.clock.seconds}")


def updates(run: train_gpt.Run, count: int) -> None:
    for step in range(count):
        run.train_step(step, train_gpt.schedule(run.hp, step, 0.0, math.inf))


def gathered(run: train_gpt.Run) -> dict[str, torch.Tensor]:
    """All state, whole, from the ranks that share the rows with this one. Collective."""
    gather = run.optimizer.gather
    return {name: gather(name, tensor).clone() for name, tensor in run.tensors().items()}


def artifact(run: train_gpt.Run) -> dict:
    """The digest of the artifact of the weights, and the rows of all that this rank has rounded."""
    rows = torch.arange(8 * 33).view(8, 33) % run.hp.vocab_size
    collected, rounded = train_gpt.Calibration(run.model, rows.numel()), []
    collected.add(rows)
    real = train_gpt.Quantiser.round
    counted = lambda self, loss: rounded.append(len(self.rows)) or real(self, loss)  # noqa: E731
    train_gpt.Quantiser.round = counted
    weights = run.optimizer.weights()
    blob = fitted(weights, run.hp, collected.sums, 20_000, comm=run.comm)
    return {"artifact": hashlib.sha256(blob).hexdigest(), "rounded": sorted(rounded)}


def steps(run: train_gpt.Run, folder: Path) -> None:
    """The artifact of the initial weights, then 5 updates without a clock. Each rank saves what it
    has rounded, digests of the artifact and of all state, collected from its node, and the weights,
    their average and the Hessians."""
    found = artifact(run)
    updates(run, 5)
    found["weights"] = run.optimizer.weights()
    found["state"] = digest([*run.model.parameters(), *gathered(run).values()])
    _, found["calibration"] = run.finish()
    found["averages"] = run.optimizer.weights()
    torch.save(found, folder / f"found{run.comm.rank}.pt")


def checkpoint(run: train_gpt.Run, folder: Path) -> None:
    """2 updates and a checkpoint."""
    updates(run, 2)
    run.save(2)
    run.checkpoints.written.result()
    torch.save(gathered(run), folder / f"saved{run.comm.rank}.pt")


def restore(run: train_gpt.Run, folder: Path) -> None:
    run.restore(*train_gpt.find_checkpoint(run.hp, run.comm)[:3])
    name = f"{run.comm.rank}-of-{run.comm.size}"
    torch.save(gathered(run), folder / f"restored{name}.pt")
    (folder / f"digest{name}").write_text(digest(run.model.parameters()))


def limit(run: train_gpt.Run, folder: Path) -> None:
    """Low-rank training, whose time ends after 5 steps on rank 0 and at once on rank 1. Each rank
    saves its steps and whether all targets were scored."""
    scorer = evaluator(run.model, run.val, run.hp, run.runtime, run.hp.eval_stride)
    learn, steps, rank = train_gpt.lora_step, [], run.comm.rank

    def counted(*arguments):
        learn(*arguments)
        steps.append(1)
        scorer.started -= 1e9 * (len(steps) == 5)

    scorer.started -= 1e9 * rank
    train_gpt.lora_step, train_gpt.LORA_BATCH = counted, 2
    train_gpt.ttt_lora(scorer)
    complete = scorer.result().val_tokens == run.val.targets
    (folder / f"limit{rank}").write_text(f"{len(steps)} {complete}")


def apart(folder: Path) -> None:
    """The whole script, each rank in a folder of its own, as on several nodes. The timer of rank 1 is
    1,000 s ahead."""
    rank, elapsed = int(os.environ["RANK"]), train_gpt.Clock.elapsed
    train_gpt.Clock.elapsed = lambda clock: 1000 * rank + elapsed(clock)
    place = folder / f"node{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    sys.argv[1:] = []
    train_gpt.main()


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "apart":
        return apart(folder)
    unequal_start()
    hp = train_gpt.Hyperparameters.from_env(dict(os.environ))
    with train_gpt.Runtime.start(hp) as runtime:
        log = train_gpt.Log(hp, runtime.comm, folder)
        run = train_gpt.Run(hp, runtime, log, train_gpt.read_validation(hp, runtime.device))
        globals()[mode](run, folder)
    # Those of the process group may abort the process. None on systems without /proc
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in threads)


main()
