#!/usr/bin/env python3
"""Run the script for several seeds and settings, one run after the other, and print a table of the
results.

    SEEDS="1337 42 2025" GRID="MATRIX_LR=0.02,0.025 MUON_WD=0.03,0.04" python tools/sweep.py -- python train_gpt.py

./run.sh calls this when SEEDS or GRID is set. Every combination of GRID runs with every seed and
has its own log, logs/<RUN_ID>_MATRIX_LR=0.02_MUON_WD=0.03_seed1337.txt. The values of
TTT_LORA_TARGETS, which is a list itself, are separated by |. A finished run is not repeated, so an
interrupted sweep continues where it stopped, with CHECKPOINT_EVERY also within a run. Failed runs
are reported and retried next time. A finished run over the limits of time or size is reported as
failed until its files are deleted.
"""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import pack_code
import train_gpt
from lib import runs
from train_gpt import Hyperparameters, UserError, require

LOGS = Path("logs")
RUNNING: set[subprocess.Popen] = set()


def combinations(grid: str) -> list[dict[str, str]]:
    """Every combination of the values of "A=1,2 B=3,4", in order; those of a knob that is itself a
    list with commas are "A=x,y|z". Raises UserError for an unknown knob."""
    axes = []
    for part in grid.split():
        name, _, values = part.partition("=")
        require(values, f"GRID has {part!r}, which is not KNOB=value,value")
        known = name in runs.KNOBS
        require(known, f"GRID: {name} is not a knob; python train_gpt.py --help lists knobs")
        is_list = "," in str(getattr(Hyperparameters, name.lower()))
        axes.append([(name, value) for value in values.split("|" if is_list else ",")])
    return [dict(chosen) for chosen in itertools.product(*axes)]


def plan(environ: dict[str, str]) -> list[dict[str, str]]:
    """The variables of each run: of the grid, SEED, RUN_ID and RESUME. Raises UserError for SEEDS or
    GRID, or if one of the runs could not start."""
    seeds = environ.get("SEEDS", "").split() or [environ.get("SEED", "1337")]
    twice = f"SEEDS={environ.get('SEEDS')!r} names a seed twice"
    require(len(set(seeds)) == len(seeds), f"{twice}; a repeated run is not another sample")
    several = seeds[0].split()[1:]
    require(not several, f"SEED={seeds[0]!r} has several seeds: set SEEDS={seeds[0]!r}")
    prefix = environ.get("RUN_ID") or "run"
    planned = []
    for values, seed in itertools.product(combinations(environ.get("GRID", "")), seeds):
        parts = (f"{knob}={value}" for knob, value in values.items())
        # Tools take a comma as the end of a log's name.
        run_id = "_".join([prefix, *parts, f"seed{seed}"]).replace("/", "-").replace(",", "+")
        # With RESUME a run without checkpoints begins.
        variables = {**values, "SEED": seed, "RUN_ID": run_id, "RESUME": "auto"}
        Hyperparameters.from_env({**environ, **variables})
        planned.append(variables)
    return planned


def traces(run_id: str) -> str:
    """What a repeated run would find of its predecessor, as words of a command."""
    paths = LOGS / f"{run_id}.txt", LOGS / f"{run_id}.jsonl", train_gpt.CHECKPOINTS / run_id
    return shlex.join(str(path) for path in paths if path.exists())


def refuse_old_checkpoints(run_id: str) -> None:
    """Raise UserError if the run would resume checkpoints that this sweep does not write."""
    folder = train_gpt.CHECKPOINTS / run_id
    require(
        os.environ.get("CHECKPOINT_EVERY")
        or os.environ.get("RESUME")
        or not any(folder.glob(train_gpt.CHECKPOINT_FILES)),
        f"{folder} holds an earlier run: rm -r {shlex.quote(str(folder))}, or set RESUME=auto to "
        "continue it",
    )


class Invalid(UserError):
    """A finished run that is over a limit."""


def finished(environ: dict[str, str], run_id: str) -> runs.Run | None:
    """The run of this name if it has finished. Raises Invalid if it is over a limit, UserError if
    its log is of another experiment."""
    path = LOGS / f"{run_id}.txt"
    try:
        run = runs.read_run(path)
    except UserError:
        return None  # no log, or one that ends before the first step
    hp = Hyperparameters.from_env(environ)
    if not run.finished:
        return None
    wanted = {name.upper(): str(value) for name, value in vars(hp).items()}
    unlike = [
        f"{name}={run.settings.get(name)}, now {value}"
        for name, value in wanted.items()
        if run.settings.get(name) != value and name not in runs.WITHOUT_EFFECT
    ]
    unlike += ["another train_gpt.py"] * (not pack_code.is_current(run.source))
    require(
        not unlike,
        f"{path} is a finished run of another configuration ({'; '.join(unlike[:4])}): "
        f"set another RUN_ID, or move its files away: {traces(run_id)}",
    )
    try:  # as the script does after its scores
        train_gpt.check_limits(run.total_bytes or 0, run.train_seconds or 0.0, hp)
    except UserError as error:
        raise Invalid(f"error: {error}. To repeat the run: rm -r {traces(run_id)}") from error
    return run


def execute(
    command: list[str], environ: dict[str, str], quiet: bool = False, folder: Path = Path()
) -> str:
    """Run the command; `quiet` hides what it prints. Returns its error message or ""."""
    streams = {"stdout": subprocess.DEVNULL if quiet else None, "stderr": subprocess.PIPE}
    streams |= {"text": True, "errors": "replace"}
    process = subprocess.Popen(command, env=environ, cwd=folder, **streams)
    message = ""
    RUNNING.add(process)
    try:
        for line in process.stderr:
            if line.startswith("error:"):
                message = line.strip()
            if not (quiet and line.startswith("error:")):
                with contextlib.suppress(OSError):  # nobody reads it: the run goes on
                    sys.stderr.write(line)
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it has received the same Ctrl-C and finishes its log
        raise
    finally:
        RUNNING.discard(process)
    return "" if status == 0 else message or f"error: exit status {status}"


def report(planned: list[dict[str, str]], done: dict[str, runs.Run], failed: dict[str, str]) -> str:
    """A table for each combination of the grid, then the failed and the missing runs."""
    groups: dict[str, list[dict[str, str]]] = {}
    for variables in planned:
        own = ("SEED", "RUN_ID", "RESUME")
        values = " ".join(f"{k}={v}" for k, v in variables.items() if k not in own)
        groups.setdefault(values, []).append(variables)
    lines = []
    for values, members in groups.items():
        lines.append(f"\n{values or 'as set'}")
        there = [v for v in members if v["RUN_ID"] in done]
        names = [f"seed {v['SEED']}" for v in there]
        found = [done[v["RUN_ID"]] for v in there]
        lines.append(runs.table(found, names) if found else "no run finished")
    lines += [f"\nfailed: {run_id}: {message}" for run_id, message in failed.items()]
    missing = [v["RUN_ID"] for v in planned if v["RUN_ID"] not in done | failed]
    if missing:
        lines.append(f"\nnot finished: {' '.join(missing)}; start again to go on")
    after = "after: of the artifact, non-overlapping windows; score: final"
    lines.append(f"\nbefore: bpb of the averaged weights; {after}")
    return "\n".join(lines)


def patterns(planned: list[dict[str, str]]) -> str:
    """Words for tools/compare.py: the logs of two combinations, or of one and another sweep's."""
    groups = dict.fromkeys(variables["RUN_ID"].rpartition("seed")[0] for variables in planned)
    return shlex.join([f"{LOGS}/{name}*.txt" for name in [*groups, "OTHER_"][:2]])


def sweep(command: list[str]) -> int:
    """Run what has not finished yet and print the report. Returns the exit status."""
    planned = plan(dict(os.environ))
    done: dict[str, runs.Run] = {}
    failed: dict[str, str] = {}

    def settle(variables: dict[str, str], otherwise: str = "") -> None:
        """Note whether the run has finished or has failed."""
        run_id = variables["RUN_ID"]
        try:
            run = finished({**os.environ, **variables}, run_id)
        except Invalid as error:
            run, otherwise = None, str(error)
        if run:
            done[run_id] = run
        elif otherwise:
            failed[run_id] = otherwise

    for number, variables in enumerate(planned, start=1):
        settle(variables)
        if variables["RUN_ID"] in done:
            print(f"== {number} of {len(planned)}: {variables['RUN_ID']} is done already")
        elif variables["RUN_ID"] not in failed:
            refuse_old_checkpoints(variables["RUN_ID"])
    status = 0
    try:
        for number, variables in enumerate(planned, start=1):
            run_id = variables["RUN_ID"]
            if run_id in (done | failed):
                continue
            print(f"== {number} of {len(planned)}: {run_id}", flush=True)
            if message := execute(command, {**os.environ, **variables}):
                failed[run_id] = message
            else:
                unfinished = f"{LOGS / run_id}.txt is not finished"
                settle(variables, f"error: it exited with 0, but {unfinished}")
    except KeyboardInterrupt:
        status = 130
    finally:  # also if the script was edited meanwhile
        print(report(planned, done, failed))
    return status or int(bool(failed))


def end_runs(*_) -> None:
    """The handler of SIGTERM: the runs get it too, and the program ends as after Ctrl-C."""
    for process in list(RUNNING):
        process.terminate()
    raise KeyboardInterrupt


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("command", nargs="*", help="the command that starts one run, after --")
    text = "print words for tools/compare.py; run nothing"
    parser.add_argument("--patterns", action="store_true", help=text)
    arguments = parser.parse_args()
    if arguments.patterns:
        print(patterns(plan(dict(os.environ))))
        return
    if not arguments.command:
        parser.error("give the command that starts one run, after --")
    signal.signal(signal.SIGTERM, end_runs)
    sys.exit(sweep(arguments.command))


if __name__ == "__main__":
    program.run_program(main)
