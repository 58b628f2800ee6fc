#!/usr/bin/env python3
"""Show a run in TensorBoard, trackio or wandb: follow its log in a process beside the training.

    python tools/track.py logs/RUN_ID.jsonl --to tensorboard    # then: tensorboard --logdir logs
    python tools/track.py logs/RUN_ID.jsonl --to trackio        # then: trackio show
    WANDB_MODE=offline python tools/track.py logs/RUN_ID.jsonl --to wandb

It waits for a log that does not exist yet, sends it from its first line, and ends with the run's
last event. A run that dies has no such event, because it may be resumed: Ctrl-C or SIGTERM ends the
following. Where a resumed run repeats steps, TensorBoard shows the new values, trackio and wandb
keep the first ones. A log that is sent again continues wandb's run and replaces TensorBoard's;
trackio makes another one. Their own variables apply (TRACKIO_SPACE_ID, WANDB_MODE).
"""

import argparse
import calendar
import contextlib
import importlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
from lib.runs import DAMAGED, parse_event
from train_gpt import as_user_error, require, writing

MODULES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
POLL = 1.0  # seconds between two looks at the log
PROJECT = "parameter-golf"  # of trackio and wandb
FINAL = re.compile(r"final_(?:int6_)?(\w+?)(?:_exact)?")
METRICS = {  # names of what is sent, by event and field; "score": all that FINAL matches
    "train": {"train_loss": "train/loss", "train_seconds": "train_seconds"}
    | {name: f"train/{name}" for name in ("lr_scale", "tokens_per_second", "qat", "seq_len")},
    "val": {"val_loss": "val/loss", "val_bpb": "val/bpb", "train_seconds": "train_seconds"},
    "peak_memory": {name: f"memory/{name}" for name in ("allocated", "reserved")},
    "artifact": {"model_bytes": "bytes/model", "code_bytes": "bytes/code"},
    "score": {"val_bpb": "score/{}", "val_loss": "score_loss/{}", "eval_seconds": "score_s/{}"},
    "finished": {"bytes": "bytes/total"},
}


def metrics(event: dict) -> dict[str, float]:
    """What is sent of an event, by name; 0 or 1 for a switch."""
    score = FINAL.fullmatch(event["event"])
    names = METRICS.get("score" if score else event["event"], {})
    part = score[1] if score else ""
    return {name.format(part): +event[field] for field, name in names.items() if field in event}


class Tail:
    """The events of a growing log."""

    def __init__(self, path: Path):
        self.path = path
        self.first = b""  # line; it has the time at which the run started
        self.position = 0

    def read(self) -> Iterator[dict | None]:
        """The events since the last call. None: another run has replaced the log."""
        with self.path.open("rb") as file:
            if file.read(len(self.first)) != self.first:
                self.first, self.position = b"", 0
                yield None
            file.seek(self.position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.position += len(complete)
        self.first = self.first or complete.partition(b"\n")[0]
        yield from map(parse_event, complete.splitlines())


def follow(path: Path) -> Iterator[dict | None]:
    """The events of a log up to "finished"."""
    tail, waits = Tail(path), False
    while True:
        try:
            for event in tail.read():
                yield event
                if event and event["event"] == "finished":
                    return
        except FileNotFoundError:
            if not waits:
                print(f"waiting for {path}; Ctrl-C ends", flush=True)
            waits = True
        time.sleep(POLL)


class TensorBoard:
    """Event files in DIR/tensorboard/RUN_ID. TensorBoard does not show those of an earlier call."""

    def __init__(self, module: ModuleType, arguments: argparse.Namespace, name: str, config: dict):
        self.module = module
        self.place = arguments.dir / "tensorboard" / name
        with writing(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
        self.open(first_step=0)
        rows = "\n".join(f"| {knob} | {value} |" for knob, value in config.items())
        self.writer.add_text("configuration", f"| knob | value |\n|---|---|\n{rows}")
        # Without the first of the three, TensorBoard compares runs by all their scalars.
        _, begin, self.end = module.summary.hparams(config, {})
        self.writer.file_writer.add_summary(begin)

    def open(self, first_step: int) -> None:
        """Begin a file. TensorBoard drops what earlier ones have from this step on."""
        self.writer = self.module.SummaryWriter(self.place, purge_step=first_step)

    def log(self, values: dict[str, float], step: int, when: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=when)
        self.writer.flush()  # TensorFlow, if installed, buffers files

    def resume(self, step: int) -> None:
        self.writer.close()
        self.open(first_step=step + 1)

    def finish(self) -> None:
        self.writer.file_writer.add_summary(self.end)
        self.writer.close()


class Service:
    """A run of trackio or wandb, which have the same interface."""

    def __init__(self, module: ModuleType, arguments: argparse.Namespace, name: str, config: dict):
        self.module = module
        self.place = f"project {PROJECT}"
        self.step = 0
        options = {}
        if arguments.to == "wandb":
            # The same log, sent again, continues the same run.
            key = re.sub(r"[^\w.=-]", "-", f"{name}-{config['started']}")
            options = {"id": key, "resume": "allow", "dir": arguments.dir}
        self.run = module.init(project=PROJECT, name=name, config=config, **options)
        self.last: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int, when: float) -> None:
        self.last |= values
        if step >= self.step:  # wandb refuses others
            self.module.log(values, step=step)
            self.step = step

    def resume(self, step: int) -> None:
        """Nothing: `log` skips steps that were sent already."""

    def finish(self) -> None:
        # wandb ignores the steps of a log that is sent again, and with the last one the scores.
        if hasattr(self.run, "summary"):
            self.run.summary.update(self.last)
        self.module.finish()


class Sender:
    """Sends a log's events to a tracker, each run of the log as a run of its own."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        advice = f"pip install {arguments.to}"
        with as_user_error(f"--to {arguments.to}", advice, ImportError):
            self.module = importlib.import_module(MODULES[arguments.to])
        self.tracker = None
        self.step = 0
        self.opened = 0.0  # the log, in seconds since 1970

    def sending(self) -> contextlib.AbstractContextManager:
        """Turn a failure of the tracker into a UserError."""
        advice = "the log has everything: start this command again"
        return as_user_error(f"cannot send to {self.arguments.to}", advice, Exception)

    def open(self, event: dict) -> None:
        """Begin the tracker's run. Raises UserError unless the event is a run's first."""
        path, to = self.arguments.log, self.arguments.to
        begins = {"run_id", "started", "hyperparameters"} <= event.keys()
        advice = "give the logs/<RUN_ID>.jsonl of a run"
        require(begins, f"{path} does not begin with the settings of a run; {advice}")
        facts = {name: event.get(name, "") for name in ("started", "versions", "runtime")}
        kind = TensorBoard if to == "tensorboard" else Service
        with self.sending():
            config = event["hyperparameters"] | facts
            self.tracker = kind(self.module, self.arguments, event["run_id"], config)
        self.step = 0
        print(f"sending {path} to {to}, {self.tracker.place}", flush=True)

    def send(self, event: dict) -> None:
        """Send one event, of a log from its first. Raises UserError."""
        if self.tracker is None:
            self.open(event)
        if event["event"] == DAMAGED:
            print(f"left out: a line of {self.arguments.log} that a crash or a full disk has cut")
            return
        with self.sending():
            if event["event"] == "start":  # a resumed run has another
                started = time.strptime(event["started"], "%Y-%m-%dT%H:%M:%SZ")
                self.opened = calendar.timegm(started)
            self.step = event.get("step", self.step)
            if event["event"] == "resumed":
                self.tracker.resume(self.step)
            if values := metrics(event):
                self.tracker.log(values, self.step, self.opened + event["seconds"])

    def close(self) -> None:
        """End the tracker's run."""
        tracker, self.tracker = self.tracker, None
        if tracker:
            with self.sending():
                tracker.finish()
            print(f"sent to {self.arguments.to} up to step {self.step}", flush=True)


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("log", type=Path, help="logs/<RUN_ID>.jsonl")
    parser.add_argument("--to", choices=MODULES, required=True)
    arguments = parser.parse_args()
    wrong = f"{arguments.log} does not end in .jsonl: give the logs/<RUN_ID>.jsonl of a run"
    require(arguments.log.suffix == ".jsonl", wrong)
    arguments.dir = arguments.log.parent  # of TensorBoard's and wandb's files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.closing(Sender(arguments)) as sender:
        for event in follow(arguments.log):
            if event is None:
                sender.close()
            else:
                sender.send(event)


if __name__ == "__main__":
    program.run_program(main)
