#!/usr/bin/env python3
"""Run the script for several seeds and settings, one after the other, and say what came out.

    SEEDS="1337 42 2025" GRID="MATRIX_LR=0.02,0.025 MUON_WD=0.03,0.04" python tools/sweep.py -- python train_gpt.py

(./run.sh does that when SEEDS or GRID is set.) Every combination of GRID is run with every seed, with a log of its own:
logs/<RUN_ID>_MATRIX_LR=0.02_MUON_WD=0.03_seed1337.txt; the artifact is kept beside it. A run whose log has its final
score is not repeated, so an interrupted sweep goes on where it was; a failed run is reported and tried again next time.
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import runs
from train_gpt import ARTIFACT, SUBMISSION_CAP, Hyperparameters, UserError, source_code

LOGS = Path("logs")


def combinations(grid: str) -> list[dict[str, str]]:
    """Every combination of the values of "A=1,2 B=3,4", in order. Raises UserError for what is no knob."""
    axes = []
    for part in grid.split():
        name, _, values = part.partition("=")
        if name.lower() not in Hyperparameters.__dataclass_fields__ or not values:
            raise UserError(
                f"GRID has {part!r}, which is not KNOB=value,value: see python train_gpt.py --help for the knobs"
            )
        axes.append([(name, value) for value in values.split(",")])
    return [dict(chosen) for chosen in itertools.product(*axes)]


def plan(environ: dict[str, str]) -> list[dict[str, str]]:
    """The variables of each run, RUN_ID and SEED among them. Raises UserError if any of them could not start."""
    seeds = environ.get("SEEDS", "").split() or [environ.get("SEED", "1337")]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"SEEDS={environ['SEEDS']!r} names a seed twice: the same run again is not another sample")
    planned, prefix = [], environ.get("RUN_ID") or "run"
    for values, seed in itertools.product(combinations(environ.get("GRID", "")), seeds):
        name = "_".join([prefix, *(f"{knob}={value}" for knob, value in values.items()), f"seed{seed}"])
        planned.append({**values, "SEED": seed, "RUN_ID": name.replace("/", "-")})
        Hyperparameters.from_env({**environ, **planned[-1]})
    return planned


def finished(environ: dict[str, str], run_id: str) -> runs.Run | None:
    """The run of that name if its log says that it came to its end. Raises UserError if it is another experiment's."""
    path = LOGS / f"{run_id}.txt"
    try:
        run = runs.read_run(path)
    except UserError:
        return None  # no log, or one that ends before the first step
    hp = Hyperparameters.from_env(environ)
    if (
        run.score_name is None
        or (hp.ttt_enabled and "ttt" not in run.score_name)
        or (run.total_bytes or 0) > SUBMISSION_CAP
    ):
        return None
    wanted = {name.upper(): str(value) for name, value in vars(hp).items()}
    unlike = [
        f"{name}={run.settings.get(name)}, now {value}"
        for name, value in wanted.items()
        if run.settings.get(name) != value
    ]
    if run.source != source_code():
        unlike.append("another train_gpt.py")
    if unlike:
        raise UserError(
            f"{path} is a finished run of another configuration ({'; '.join(unlike[:4])}): set another RUN_ID, or move that log away"
        )
    return run


def execute(command: list[str], environ: dict[str, str], quiet: bool = False) -> str:
    """Run the command, with its output on this console unless it is to be quiet. Returns what went wrong, or ""."""
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace")
    said = ""
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            said = line.strip() if line.startswith("error:") else said
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it has had the same Ctrl-C, and writes down what it has
        raise
    return "" if status == 0 else said or f"error: exit status {status}"


def artifact_of(run_id: str) -> Path:
    """Where the artifact of a run is kept."""
    return LOGS / f"{run_id}{''.join(ARTIFACT.suffixes)}"


def keep_artifact(run_id: str) -> None:
    """Put the artifact that a run has just written beside its log."""
    ARTIFACT.replace(artifact_of(run_id))


def report(planned: list[dict[str, str]], done: dict[str, runs.Run], failed: dict[str, str]) -> str:
    """A table for each combination of the grid, and what failed."""
    lines, groups = [], {}
    for variables in planned:
        values = " ".join(f"{k}={v}" for k, v in variables.items() if k not in ("SEED", "RUN_ID"))
        groups.setdefault(values, []).append(variables)
    for values, members in groups.items():
        of_group = [(f"seed {v['SEED']}", done[v["RUN_ID"]]) for v in members if v["RUN_ID"] in done]
        lines.append(f"\n{values or 'as set'}")
        lines.append(
            runs.table([run for _, run in of_group], [name for name, _ in of_group]) if of_group else "no run finished"
        )
    lines += [f"\nfailed: {run_id}: {what}" for run_id, what in failed.items()]
    open_ = [v["RUN_ID"] for v in planned if v["RUN_ID"] not in done and v["RUN_ID"] not in failed]
    lines += [f"\nnot run yet: {' '.join(open_)}"] if open_ else []
    lines += [
        "",
        "before: bpb of the averaged weights; after: of the artifact, windows side by side; score: the one that counts",
    ]
    return "\n".join(lines)


def sweep(command: list[str]) -> int:
    """All runs that are not done yet, and the report. Returns the exit status: that of an interrupted sweep is 130."""
    planned, done, failed, status = plan(dict(os.environ)), {}, {}, 0
    for number, variables in enumerate(planned, start=1):
        run_id, environ = variables["RUN_ID"], {**os.environ, **variables}
        if run := finished(environ, run_id):
            done[run_id] = run
            print(f"== {number} of {len(planned)}: {run_id} is done already", flush=True)
    try:
        for number, variables in enumerate(planned, start=1):
            run_id, environ = variables["RUN_ID"], {**os.environ, **variables}
            if run_id in done:
                continue
            print(f"== {number} of {len(planned)}: {run_id}", flush=True)
            if what := execute(command, environ):
                failed[run_id], status = what, 1
            elif run := finished(environ, run_id):
                done[run_id] = run
                keep_artifact(run_id)
            else:
                failed[run_id], status = f"error: it ended well, but {LOGS / run_id}.txt has no final score", 1
    except KeyboardInterrupt:
        status = 130
    print(report(planned, done, failed))
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+", help="what one run is started with, after --")
    try:
        sys.exit(sweep(parser.parse_args().command))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
