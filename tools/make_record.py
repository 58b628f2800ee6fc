#!/usr/bin/env python3
"""Make a submission folder from the logs of its seeds.

    python tools/make_record.py --track 10min_16mb --name "Sparse gates" --author "Ada Example" --github-id ada \\
        "logs/run_seed*.txt"

writes records/track_<track>/<date>_<slug>/ with README.md, submission.json, train_gpt.py (the
script that ran, packed if it was), train_seed<N>.log and requirements.txt (the versions that ran).
Every figure comes from the logs. README.md and submission.json mark what you have to write yourself
with "to fill". Then check the folder with tools/check_record.py.

A score of its own (EVAL_ONLY) counts if its log is among the logs: it belongs to the run that made
its artifact, and the folder gets it as eval_seed<N>.log.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import program
import pack_code
import train_gpt
from lib import runs
from lib.runs import Run, mean_std
from train_gpt import require

CAP = train_gpt.SUBMISSION_CAP
TRACKS = ("10min_16mb", "non_record_16mb")
SECONDS = 600.0  # the challenge's limit for training, and for evaluation
READABLE = "train_gpt.readable.py"


def logs_of(members: list[Run]) -> list[Run]:
    """Those of trainings and of evaluations."""
    return [log for run in members for log in run.logs]


def source_of(members: list[Run]) -> bytes:
    """The readable script with which all these logs begin. Raises UserError."""
    for run in logs_of(members):
        require(
            None not in (run.source, run.started),
            f"{run.path} does not begin with the script that ran: "
            "give the logs/<RUN_ID>.txt that train_gpt.py wrote, not its console output",
        )
        require(
            run.source == members[0].source,
            f"{members[0].path.name} and {run.path.name} begin with different scripts: "
            "score the artifact with the script that trained it",
        )
    return members[0].source


def code_of(members: list[Run]) -> bytes:
    """The script file that ran: the source in the logs, readable or packed. Raises UserError."""
    source, sizes = source_of(members), {run.code_bytes for run in members}
    require(None not in sizes, "a log has no size of its code: the run did not reach its export")
    same = f"the logs have code sizes {sizes}: all seeds must run the same script file"
    require(len(sizes) == 1, same)
    if len(source) in sizes:
        return source
    code = pack_code.pack(source)
    require(
        len(code) in sizes,
        f"{members[0].path} counts {sizes.pop()} bytes of code, but the script in it has "
        f"{len(source)}: the log was altered, or the script was not packed with tools/pack_code.py",
    )
    return code


def on_8xh100(members: list[Run]) -> bool:
    """Whether all logs show the challenge's machine."""
    return all(run.ranks == 8 and "H100" in (run.device or "") for run in logs_of(members))


def hardware(members: list[Run]) -> str:
    """A description of the machines."""
    found = set()
    for run in logs_of(members):
        one_cpu = "CPU" in (run.device or "") and run.ranks == 1
        found.add(run.device if one_cpu else f"{run.ranks} x {run.device}")
    return " and ".join(sorted(found))


def seed_result(run: Run, code_bytes: int) -> dict:
    """The results of one seed, under the names that merged submissions use."""
    found = {
        "val_loss": run.score.loss,
        "val_bpb": run.score.bpb,
        "artifact_bytes": run.model_bytes and run.model_bytes + code_bytes,
        "bytes_model": run.model_bytes,
        "steps": run.steps,
        "step_avg_ms": run.step_ms and round(run.step_ms, 2),
        "train_time_s": run.train_seconds and round(run.train_seconds, 3),
        "eval_time_s": run.eval_seconds and round(run.eval_seconds, 1),
        "pre_quant_val_bpb": run.before_export and run.before_export.bpb,
        "roundtrip_val_bpb": run.after_export and run.after_export.bpb,
    }
    return {key: value for key, value in found.items() if value is not None}


# What today's repository asks about: vectors that are fitted to single samples (SLOT), training on
# validation text before the export, and caches of n-grams.
ABSENT = ("no_slot", "no_pre_quant_ttt", "no_ngram_cache")
ATTRIBUTION = "descends from #399 by abaybektursun"
UNKNOWN = "(to fill: true or false; the logs do not show it, as of a changed script)"


def compliance(members: list[Run], code_bytes: int) -> dict[str, bool | None]:
    """What the logs show of each statement; None if they do not show it."""

    def within(values: list[float | None], limit: float) -> bool | None:
        return None if None in values else max(values) <= limit

    # Of this repository's script as it is we know what it has.
    ours = all(pack_code.is_current(run.source) for run in logs_of(members)) or None
    sizes = [run.model_bytes and run.model_bytes + code_bytes for run in members]
    machines = [value for run in logs_of(members) for value in (run.device, run.ranks)]
    found = {
        "train_under_600s": within([run.train_seconds for run in members], SECONDS),
        "artifact_under_16mb": within(sizes, CAP),
        "eval_under_600s": within([run.eval_seconds for run in members], SECONDS),
        "three_seeds": len(members) >= 3,
        "hardware_8xh100": None if None in machines else on_8xh100(members),
    }
    found |= dict.fromkeys(ABSENT, ours)
    if any(run.configuration.get("NGRAM_TILT") == "True" for run in members):
        found["no_ngram_cache"] = False
    if "ttt" in members[0].score_name:
        found["score_first_ttt"] = ours
    return found


def versions_of(members: list[Run]) -> dict[str, str]:
    """The versions of all logs by package; several are joined by "and"."""
    found: dict[str, list[str]] = {}
    for name, version in (item for run in logs_of(members) for item in run.versions.items()):
        found.setdefault(name, []).append(version)
    return {name: " and ".join(dict.fromkeys(several)) for name, several in found.items()}


def summary(members: list[Run], code_bytes: int) -> dict:
    """The part of submission.json that follows from the logs. `val_loss` is in nats per token,
    `val_bpb` in bits per byte; both are means over seeds."""
    loss, loss_std = mean_std([run.score.loss for run in members])
    bpb, bpb_std = mean_std([run.score.bpb for run in members])
    found = {"val_loss": round(loss, 8), "val_bpb": round(bpb, 8)}
    if bpb_std is not None:
        found |= {"val_loss_std": round(loss_std, 8), "val_bpb_std": round(bpb_std, 8)}
    rows = {str(run.seed): seed_result(run, code_bytes) for run in members}
    return found | {
        "seeds": [run.seed for run in members],
        "seed_results": rows,
        "bytes_total": max(row.get("artifact_bytes", 0) for row in rows.values()) or None,
        "bytes_code": code_bytes,
        "hardware": hardware(members),
        "pytorch_version": versions_of(members).get("torch", "not stated"),
        "eval_method": members[0].score_name,
        "compliance": compliance(members, code_bytes),
    }


def portable(value: str) -> str:
    """The value of a knob as it is on any machine: of an absolute path the last name."""
    return Path(value).name if value.startswith("/") else value


def launch(run: Run) -> str:
    """The command line that repeats the run or the evaluation."""
    switches = {"True": "1", "False": "0"}
    # Validations and lines of the log take time of the run
    shown = runs.CONFIGURATION | {"VAL_LOSS_EVERY", "TRAIN_LOG_EVERY"}
    seed = ["SEED=$SEED"]
    if run.settings.get("EVAL_ONLY"):  # the artifact has the other knobs
        shown, seed = {"EVAL_ONLY", *runs.SCORING}, []
    changed = {name: portable(run.settings[name]) for name in run.changed if name in shown}
    # A CPU's threads decide rounding
    if threads := re.search(r", (\d+) threads", run.device or ""):
        changed["OMP_NUM_THREADS"] = threads[1]
    words = [f"{name}={shlex.quote(switches.get(value, value))}" for name, value in changed.items()]
    many = f"torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node={run.ranks}"
    start = "python" if run.ranks == 1 else many
    lines = [""]
    for word in [*words, *seed, f"{start} train_gpt.py"]:
        if lines[-1] and len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += word + " "
    return " \\\n".join(line.rstrip() for line in lines)


SCORES = ("val_bpb", "val_loss", "pre_quant_val_bpb", "roundtrip_val_bpb")
RESULT_COLUMNS = dict.fromkeys(SCORES, ".5f") | {"steps": ".0f", "step_avg_ms": ".2f"}
RESULT_COLUMNS |= {"train_time_s": ".1f", "eval_time_s": ".1f", "artifact_bytes": ",.0f"}


def results_table(facts: dict) -> str:
    """The results in Markdown, one line per seed, then mean and standard deviation."""
    results = facts["seed_results"]
    columns = [
        (name, form, lambda row, name=name: row.get(name)) for name, form in RESULT_COLUMNS.items()
    ]
    head = ["seed", *(f"`{name}`" for name in RESULT_COLUMNS)]
    rows = runs.rows(list(results.values()), list(results), columns, unknown="")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def readme(given: dict, members: list[Run], facts: dict, packed: bool) -> str:
    """README.md: the figures from the logs, and three sections for the author to write."""
    first, n = members[0], len(members)
    spread = f", standard deviation {facts['val_bpb_std']:.5f}" if n > 1 else ""
    seeds = "1 seed" if n == 1 else f"{n} seeds"
    names = ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")
    data = {name: portable(first.configuration.get(name, "not stated")) for name in names}
    data = ", ".join(f"`{name}={value}`" for name, value in data.items())
    scored = "not stated"
    if first.score.tokens and first.score.nbytes:
        scored = f"{first.score.tokens:,} targets of {first.score.nbytes:,} bytes"
    parts = [
        f"# {given['name']}",
        f"**val_bpb {facts['val_bpb']:.5f}** (mean of {seeds}{spread}; `{facts['eval_method']}`), "
        f"{facts['bytes_total']:,} of {CAP:,} bytes, on {facts['hardware']}.",
    ]
    if not facts["compliance"]["hardware_8xh100"]:
        parts.append(
            f"This is not a record: it ran on {facts['hardware']}, and the challenge asks for 8 x H100. "
            "Times and scores are those of this machine."
        )
    parts += ["## Results", results_table(facts)]
    versions = [f"- {name} {version}" for name, version in versions_of(members).items()]
    script = f"packed; `{READABLE}` is its readable source" if packed else "byte for byte"
    command = f"For each seed of {' '.join(map(str, facts['seeds']))}:\n\n```\n{launch(first)}\n```"
    logs = "`train_seed<N>.log` are the complete logs"
    if first.evaluation:
        command += f"\n\nThen for each artifact, here of seed {first.seed}:\n\n```\n{launch(first.evaluation)}\n```"
        logs = "`train_seed<N>.log` and `eval_seed<N>.log` are the complete logs"
    parts += [
        "## Environment",
        "\n".join([*versions, f"- {facts['hardware']}"]),
        "## Command",
        command,
        "## Data",
        f"{data}. Scored: {scored}.",
        "## Fixes",
        '(to fill: bugs fixed, or "none")',
        "## Simplifications",
        '(to fill: what was removed, or "none")',
        "## Additions",
        '(to fill: what is new and its gain, or "none")',
        "## Files",
        f"`train_gpt.py` is the script that ran, {script}. {logs}, "
        "`submission.json` their figures, `requirements.txt` the packages that ran.",
    ]
    return "\n\n".join(parts) + "\n"


def requirements(members: list[Run]) -> str:
    """The packages that ran, pinned to the versions in the logs, the first log's if they differ."""
    lines = []
    for name, version in versions_of(members).items():
        first, *others = version.split(" and ")
        if name not in ("python", "cuda"):
            # A local build tag such as +cpu or +cu130 names a package index, not a version.
            lines.append(f"{name}=={first.split('+')[0]}")
            lines += [f"# {other} ran as well" for other in others]
    return "\n".join(lines) + "\n"


def about(given: dict, track: str, members: list[Run]) -> dict:
    """The part of submission.json that the logs do not contain, and its description of the run."""
    elsewhere = {"DATA_PATH", "TOKENIZER_PATH", "EVAL_ONLY"}
    changes = members[0].changes.items()
    shown = runs.CONFIGURATION - elsewhere
    changed = " ".join(f"{name}={portable(value)}" for name, value in changes if name in shown)
    found = {key: given[key] for key in ("author", "github_id", "name")}
    found |= {"date": last_day(members), "track": track, "attribution": ATTRIBUTION}
    return found | {"technique_summary": f"train_gpt.py with {changed or 'its defaults'}"}


def last_day(members: list[Run]) -> str:
    """YYYY-MM-DD of the last log."""
    return max(run.started for run in logs_of(members))[:10]


def make(members: list[Run], given: dict, track: str) -> Path:
    """Write the folder and return its path. Raises UserError."""
    members = runs.with_evaluations(members)
    for run in members:
        artifact = run.settings.get("EVAL_ONLY")
        require(
            not artifact,
            f"{run.path} only scores {artifact} (EVAL_ONLY) and has no training: "
            "give the log of the run that made this artifact, too",
        )
    mixed = runs.differences(members)
    require(not mixed, f"the logs mix configurations: {mixed}; a record has one configuration")
    seeds = [run.seed for run in members]
    own = None not in seeds and len(set(seeds)) == len(seeds)
    require(own, f"the logs have seeds {seeds}: each log needs its own seed")
    for run in members:
        run.score  # noqa: B018  raises if the run did not finish
    members = sorted(members, key=lambda run: run.seed)
    source = source_of(members)
    slug = re.sub("[^A-Za-z0-9.]+", "_", given["name"]).strip("_")
    folder = ROOT / "records" / f"track_{track}" / f"{last_day(members)}_{slug}"
    again = f"{folder} exists already, and records never change: give another --name"
    require(not folder.exists(), again)
    code = code_of(members)
    facts = summary(members, len(code))
    stated = {k: UNKNOWN if v is None else v for k, v in facts["compliance"].items()}
    submission = about(given, track, members) | facts | {"compliance": stated}
    files = {
        "train_gpt.py": code,
        "submission.json": (json.dumps(submission, indent=2, ensure_ascii=False) + "\n").encode(),
        "README.md": readme(given, members, facts, code != source).encode(),
        "requirements.txt": requirements(members).encode(),
    }
    if code != source:
        files[READABLE] = source
    for run in members:
        for kind, log in zip(("train", "eval"), run.logs, strict=False):
            files[f"{kind}_seed{run.seed}.log"] = log.path.read_bytes()
    # Completely or not at all
    partial = folder.with_name(folder.name + ".partial")
    with train_gpt.writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            with train_gpt.replacing(partial / name) as new:  # syncs it
                new.write_bytes(content)
        partial.rename(folder)
    return folder


def main() -> None:
    parser = program.parser(__doc__)
    add, track = parser.add_argument, lambda name: name.removeprefix("track_")
    add("logs", nargs="+", help="text logs, one per seed; folders of logs and patterns")
    add("--track", required=True, type=track, choices=TRACKS)
    add("--name", type=program.utf8, required=True, help="title of the submission")
    add("--author", type=program.utf8, required=True)
    add("--github-id", type=program.utf8, default="(to fill: your GitHub ID)")
    arguments = parser.parse_args()
    members = [runs.read_run(path) for text in arguments.logs for path in runs.find_logs(text)]
    folder = make(members, vars(arguments), arguments.track)
    paths = [f"{k}={v}" for run in members for k, v in run.settings.items() if v.startswith("/")]
    if paths := ", ".join(dict.fromkeys(paths)):
        print(f"note: the logs show paths of this machine: {paths}", file=sys.stderr)
    if warning := runs.uneven_steps(members):
        print(warning, file=sys.stderr)
    tool = Path("tools/check_record.py") if Path.cwd() == ROOT else ROOT / "tools/check_record.py"
    check = shlex.join(["python", str(tool), str(folder)])
    print(f"made: {folder}\nnow write what it marks with 'to fill', then run: {check}")


if __name__ == "__main__":
    program.run_program(main)
