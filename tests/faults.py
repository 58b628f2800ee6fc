"""`faults.py FAULT STEP [RANK]`: the script with a fault at the start of a step.

kill   SIGKILL of the process, once: it leaves a file `killed`, and does nothing if that exists
term   SIGTERM, as a batch system sends it; hup, usr1: SIGHUP of a lost terminal, SIGUSR1 of Slurm
int    Ctrl-C
late   SIGTERM during the first validation
export Ctrl-C during the export; twice: a second one at once
score  SIGHUP during the scores of the artifact
nan    a gradient that is not finite
jump   the clock jumps forward by 1,000 seconds
none   nothing
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

AT_STEP = {"term": 15, "int": 2, "hup": 1, "usr1": 10}
LATER = {  # before which function, and which signals
    "late": (train_gpt.Run, "validate", [15]),
    "export": (train_gpt, "export", [2]),
    "twice": (train_gpt, "export", [2, 2]),
    "score": (train_gpt, "score_artifact", [1]),
}


def send(*signals: int) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def strike(fault: str, run: train_gpt.Run) -> None:
    """Cause the fault of a step."""
    if fault == "kill" and not Path("killed").exists():
        Path("killed").touch()
        run.checkpoints.written.result()  # tests/test_soak.py kills while files are written
        send(9)
    if fault in AT_STEP:
        send(AT_STEP[fault])
    if fault == "nan":
        run.optimizer.flat[0] = float("nan")
    if fault == "jump":
        true_clock = train_gpt.perf_counter
        train_gpt.perf_counter = lambda: true_clock() + 1000


def before(owner, name: str, act) -> None:
    """Call `act` with the arguments of this function before each call."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: (act(*given), function(*given, **named))[1])


def main() -> None:
    fault, at, rank = sys.argv[1], int(sys.argv[2]), int((*sys.argv, 0)[3])
    sys.argv[1:] = []
    here = int(os.environ.get("RANK", 0)) == rank

    def steps(run, number, settings):
        # Steps of the warm-up do not count: only after it has a step been timed, or the run restored.
        if number == at and here and run.clock.step >= 0:
            strike(fault, run)

    before(train_gpt.Run, "train_step", steps)
    if fault in LATER and (here or fault != "late"):
        owner, name, signals = LATER[fault]
        before(owner, name, lambda *_: send(*signals))
    train_gpt.main()


main()
