"""`faults.py FAULT STEP [RANK]`: the script with a fault at the start of a step.

kill   SIGKILL of the process, once: it leaves a file `killed`, and does nothing if that exists
term   SIGTERM, as a batch system sends it; hup, usr1: SIGHUP of a lost terminal, SIGUSR1 of Slurm
int    Ctrl-C
late   SIGTERM during the first validation
export Ctrl-C during the export; twice: a second one at once
start  Ctrl-C on all ranks when the training begins: on RANK just before it notes signals, on
       the others just after
score  SIGHUP during the scores of the artifact
nan    a gradient that is not finite
jump   the clock jumps forward by 1,000 seconds
none   nothing
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "late": signal.SIGTERM}
SIGNALS |= {"hup": signal.SIGHUP, "usr1": signal.SIGUSR1}


def strike(fault: str, run: train_gpt.Run) -> None:
    """Cause the fault."""
    if fault == "kill" and not Path("killed").exists():
        Path("killed").touch()
        run.checkpoints.written.result()  # tests/test_soak.py kills while files are written
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    if fault == "nan":
        run.optimizer.flat[0] = float("nan")
    if fault == "jump":
        true_clock = time.perf_counter
        time.perf_counter = lambda: true_clock() + 1000


def main() -> None:
    fault, at, rank = sys.argv[1], int(sys.argv[2]), int((*sys.argv, 0)[3])
    sys.argv[1:] = []
    here = int(os.environ.get("RANK", 0)) == rank
    step = train_gpt.Run.train_step

    def faulty(self, number, settings):
        # Steps of the warm-up do not count: only after it has a step been timed, or the run restored.
        if fault != "late" and number == at and here and self.clock.step >= 0:
            strike(fault, self)
        return step(self, number, settings)

    def interrupted(*arguments, **options):
        if fault == "late" and here:
            strike(fault, None)
        return validate(*arguments, **options)

    def scoring(*arguments):
        if fault == "score":
            os.kill(os.getpid(), signal.SIGHUP)
        return score(*arguments)

    def noting(received):
        if fault == "start" and here:
            os.kill(os.getpid(), signal.SIGINT)
        return note(received)

    def exporting(*arguments):
        for _ in range({"export": 1, "twice": 2}.get(fault, 0)):
            os.kill(os.getpid(), signal.SIGINT)
        return export(*arguments)

    def begins(self, step):  # is called when signals are noted
        nonlocal fault
        if fault == "start" and not here and step == 0:
            fault = "none"  # a second one would end the run at once
            os.kill(os.getpid(), signal.SIGINT)
        return begin(self, step)

    note, train_gpt.stop_signals = train_gpt.stop_signals, noting
    export, train_gpt.export = train_gpt.export, exporting
    begin, train_gpt.Clock.begins = train_gpt.Clock.begins, begins
    score, train_gpt.score_artifact = train_gpt.score_artifact, scoring
    validate, train_gpt.Run.validate = train_gpt.Run.validate, interrupted
    train_gpt.Run.train_step = faulty
    train_gpt.main()


main()
