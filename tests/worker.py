"""What the tests of several ranks start under torchrun: `worker.py MODE FOLDER`.

steps   5 updates without a clock; rank 0 saves the weights, their average and the second moments that it leads to
clocks  updates under a wall clock that runs at another speed on every rank; each rank saves a digest of its weights
apart   the whole script, every rank in a folder of its own, as on several nodes
"""

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt


def digest(model) -> str:
    return hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())).hexdigest()


def main() -> None:
    mode, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ.get("RANK", 0))
    if mode == "apart":
        place = folder / f"node{rank}"
        place.mkdir()
        os.chdir(place)
        sys.argv[1:] = []
        return train_gpt.main()
    hp = train_gpt.Hyperparameters.from_env(dict(os.environ))
    with train_gpt.Runtime.start(hp) as runtime:
        run = train_gpt.Training(
            hp, runtime, train_gpt.Log(hp, runtime.ranks, folder), train_gpt.Validation(hp, runtime.device)
        )
        with contextlib.closing(run.loader):
            if mode == "clocks":
                honest = time.perf_counter
                time.perf_counter = lambda: honest() * (1 + 0.5 * rank)
                run.train()
                (folder / f"digest{rank}").write_text(f"{digest(run.model)} {run.clock.step} {run.clock.seconds}")
            else:
                for step in range(5):
                    run.train_step(step, train_gpt.schedule(hp, step, 0.0, 0.0))
                weights = run.optimizers.weights()  # all ranks take part in gathering them
                _, moments = run.finish()
                averages = run.optimizers.weights()
                if rank == 0:
                    torch.save(
                        {"weights": weights, "averages": averages, "moments": moments},
                        folder / f"found{runtime.ranks.size}.pt",
                    )
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]  # none where there is no /proc
    assert not any("gloo" in name for name in threads), "the process group outlives its end, and may abort the process"


main()
