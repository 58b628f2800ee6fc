#!/usr/bin/env python3
"""Check a submission folder against the challenge's rules: one line per rule, exit status 1 if one
is broken.

    python tools/check_record.py records/track_10min_16mb/2026-11-21_mine
    python tools/check_record.py FOLDER --legality

    ok    the rule is kept, as far as the folder shows
    FAIL  the rule is broken
    n/a   the rule does not apply (a non-record need not run on 8 x H100) or could not be checked,
          with the reason

The program runs the folder's train_gpt.py (--help, and its evaluation with --legality), so check a
stranger's folder in a container.
"""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import make_record
import pack_code
from lib import runs
from lib.runs import Run
from make_record import CAP, SECONDS
from train_gpt import UserError, require

# isort: split
import legality

# fmt: off
# What the challenge's own requirements.txt installs; it holds for folders without a requirements.txt.
GIVEN = {
    "numpy", "brotli", "tqdm", "torch", "huggingface_hub", "kernels", "setuptools", "typing_extensions", "datasets",
    "tiktoken", "sentencepiece", "wandb",
}
NETWORK = {
    "socket", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "huggingface_hub", "datasets", "wandb",
    "boto3", "gdown",
}
# fmt: on
FEW_STEPS = 100
# What published logs and submissions have alike
FIGURES = {"val_loss", "val_bpb", "val_loss_std", "val_bpb_std", "seeds", "seed_results"}
FIGURES |= {"artifact_bytes", "bytes_total", "bytes_code", "compliance"}
SECRETS = re.compile(
    r"(hf_[A-Za-z0-9]{30,}|(?:API_KEY|SECRET|PASSWORD|ACCESS_TOKEN|HF_TOKEN)\s*[=:]\s*\S{8,})"
)


class Verdict(NamedTuple):
    """One line of the report."""

    status: str  # ok, FAIL or n/a
    rule: str
    detail: str


class Folder:
    """The contents of a submission folder; what is missing has a sentence in `problems`."""

    def __init__(self, path: Path):
        files = "README.md, submission.json, train_gpt.py and logs"
        require(path.is_dir(), f"{path} is not a folder: give one with {files}")
        self.path = path
        self.problems: list[str] = []
        self.code = self.source = None  # as it is, and as people read it
        self.readme, self.submission = "", {}
        with self._noting("train_gpt.py"):
            self.code = (path / "train_gpt.py").read_bytes()
            self.source = pack_code.readable_source(self.code)
        with self._noting("README.md"):
            self.readme = (path / "README.md").read_text(encoding="utf-8", errors="replace")
        with self._noting("submission.json"):
            given = json.loads((path / "submission.json").read_bytes())
            require(isinstance(given, dict), "it is no JSON object")
            self.submission = given
        found = self.submission.get("compliance")
        self.compliance = found if isinstance(found, dict) else {}
        self.logs: list[Run] = []  # `runs` have those of evaluations joined with their trainings
        track = str(self.submission.get("track", path.resolve().parent.name)).replace("-", "_")
        self.non_record = track.removeprefix("track_").startswith("non_record")
        self.runs = self._runs()

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """A file that is missing or cannot be read is a problem."""
        try:
            yield
        except FileNotFoundError:
            self.problems.append(f"no {name}")
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {error}")

    def _runs(self) -> list[Run]:
        texts = set(self.path.glob("*.txt")) - {self.path / "requirements.txt"}
        logs = sorted(set(self.path.glob("*.log")) or texts)
        if not logs:
            self.problems.append("no log (train_seed<N>.log)")
        for log in logs:
            try:
                self.logs.append(runs.read_run(log))
            except UserError as error:
                self.problems.append(str(error))
        found = []
        for run in runs.with_evaluations(self.logs):
            if run.fault:
                self.problems.append(run.fault)
            elif run.settings.get("EVAL_ONLY"):
                name = run.path.name
                self.problems.append(f"{name} scores an artifact whose training has no log")
            else:
                found.append(run)
        return found


def verdict(rule: str, fault: str, detail: str = "") -> Verdict:
    """FAIL with the fault if there is one, else ok with the detail."""
    return Verdict("FAIL" if fault else "ok", rule, fault or detail)


def files(folder: Folder) -> Iterator[Verdict]:
    """README, JSON, script and logs."""
    yield verdict(
        "README.md, submission.json, train log and train_gpt.py are in the folder",
        "; ".join(folder.problems),
        f"{len(folder.runs)} logs",
    )
    keys = ("author", "github_id", "name", "date", "val_bpb")
    given = {key: str(folder.submission.get(key) or "(to fill") for key in keys}
    missing = ", ".join(key for key, text in given.items() if text.startswith("(to fill"))
    rule = 'submission.json "includes your name, GitHub ID, val_bpb, and related metadata"'
    yield verdict(rule, missing and f"without {missing}")
    todo, length = folder.readme.count("(to fill"), len(folder.readme)
    fault = f"{todo} sections are still to fill" if todo else "it is nearly empty"
    yield verdict("README.md is written", fault * (todo > 0 or length < 200))
    texts = {run.path.name: run.path.read_text(errors="replace") for run in folder.logs}
    leaks = ", ".join(name for name, text in texts.items() if SECRETS.search(text))
    fault = leaks and f"{leaks} contains what looks like a key or password"
    yield verdict("no log holds a secret", fault)


def claims(folder: Folder) -> Iterator[Verdict]:
    """What submission.json says of its methods; these fields are optional."""
    absent = "no SLOT, no training before the export, no n-gram caches"
    rule = f"submission.json says that it uses {absent}"
    found, disputed = folder.compliance, ""
    stated = {name: found[name] for name in make_record.ABSENT if found.get(name) is not None}
    tilted = any(run.configuration.get("NGRAM_TILT") == "True" for run in folder.runs)
    if stated.get("no_ngram_cache") is False and tilted:
        del stated["no_ngram_cache"]
        why = "NGRAM_TILT=1 counts n-grams (accepted in #2135, disputed)"
        disputed = f"no_ngram_cache is False, as {why}"
    faults = [
        f"{name} is {value!r}, not true" for name, value in stated.items() if value is not True
    ]
    attribution = folder.submission.get("attribution", "")
    if not isinstance(attribution, (str, dict, list)):
        faults.append(f"attribution is {attribution!r}, not a text")
    if faults or (stated and not disputed):
        yield verdict(rule, "; ".join(faults), ", ".join(stated))
    else:
        yield Verdict("n/a", rule, disputed or "it has none of these fields")


def close(given: object, found: object, digits: int) -> bool:
    """Whether a figure equals the logs' to as many digits as it has, and to at least `digits`."""
    if not (isinstance(given, (int, float)) and isinstance(found, (int, float))):
        return False
    digits = max(digits, len(repr(float(given)).partition(".")[2]))
    return abs(given - found) <= 0.51 * 10 ** -min(digits, 8) + 1e-12 * abs(found)


def same_figures(folder: Folder) -> Iterator[Verdict]:
    """submission.json against what tools/make_record.py would write."""
    rule = "submission.json says what the logs say"
    if not folder.runs or folder.code is None:
        yield Verdict("n/a", rule, "there are no readable logs, or no script")
        return
    facts = make_record.summary(folder.runs, len(folder.code))
    given = folder.submission | {"compliance": folder.compliance}
    ours, logged = all(run.started for run in folder.runs), facts["seed_results"]
    if not ours:  # published ones describe the machine in their own words
        facts = {name: fact for name, fact in facts.items() if name in FIGURES}
        for seed, row in logged.items():
            logged[seed] = {name: fact for name, fact in row.items() if name in FIGURES}
    facts["seeds"] = sorted(logged)
    facts["compliance"] = {"score_first_ttt": False} | facts["compliance"]
    # Published ones also list the results, name one seed, and give the total of any seed.
    if "seeds" in given:
        seeds = given["seeds"]
        given["seeds"] = sorted(map(str, seeds if isinstance(seeds, (list, dict)) else [seeds]))
    rows = given.get("seed_results", logged)
    if isinstance(rows, list):
        rows = {str(row.get("seed")): row for row in rows if isinstance(row, dict)}
    given["seed_results"] = rows = rows if isinstance(rows, dict) else logged
    if given.get("bytes_total") in [row.get("artifact_bytes") for row in logged.values()]:
        facts["bytes_total"] = given["bytes_total"]
    faults = [f"seed_results has seed {seed}, which has no log" for seed in rows.keys() - logged]
    faults += [f"seed_results lacks seed {seed}" for seed in logged.keys() - rows]
    faults += contradictions(given, facts)
    faults += words_faults(folder) if ours else []
    detail = f"val_bpb {facts['val_bpb']:.5f}, val_loss {facts['val_loss']:.5f}"
    yield verdict(rule, "; ".join(faults), f"{detail} over {len(folder.runs)} seeds")


def contradictions(given: dict, facts: dict, place: str = "") -> Iterator[str]:
    """Where entries of submission.json differ from what the logs show."""
    for name, fact in facts.items():
        value = given.get(name)
        if isinstance(fact, dict) and isinstance(value, dict):
            yield from contradictions(value, fact, f" of {name}")
        elif value is None or fact is None or value == fact or close(value, fact, 4):
            continue
        elif name == "val_loss" and close(value, facts["val_bpb"], 3):
            yield f"val_loss is {value}, which is bits per byte: val_loss is nats per token, {fact}"
        elif name == "step_avg_ms":  # in older records it has the calibration
            if not close(value, round(1000 * facts["train_time_s"] / facts["steps"], 2), 4):
                yield f"{name}{place} is {value!r}, the logs show {fact!r}"
        else:
            yield f"{name}{place} is {value!r}, the logs show {fact!r}"


def words_faults(folder: Folder) -> Iterator[str]:
    """How the day and the settings of submission.json differ from those of our logs."""
    given, last = folder.submission, make_record.last_day(folder.runs)
    if str(given.get("date", "9")) < last:
        yield f"date is {given['date']}, before the last log, {last}"
    settings, said = folder.runs[0].configuration, str(given.get("technique_summary"))
    for name, value in re.findall(r"\b([A-Z][A-Z0-9_]+)=(\S+)", said):
        logged = settings.get(name, value)
        if value not in (logged, make_record.portable(logged)):
            yield f"technique_summary has {name}={value}, the logs {name}={logged}"


def one_configuration(folder: Folder) -> Iterator[Verdict]:
    """Seeds, settings, and the script that ran."""
    members = folder.runs
    yield verdict("all seeds of a mean are from one configuration", runs.differences(members))
    seeds = [run.seed for run in members]
    fault = f"seeds {seeds}: one occurs twice" * (len(set(seeds)) < len(seeds))
    fault = "a log does not contain its seed" if None in seeds else fault
    yield verdict("each log is of a seed of its own", fault, " ".join(map(str, seeds)))
    scored = {(run.score.tokens, run.score.nbytes) for run in members}
    tokens, nbytes = next(iter(scored), (None, None))
    detail = "the logs do not say how much"
    if tokens and nbytes:
        detail = f"{tokens:,} tokens, {nbytes:,} bytes"
    fault = f"tokens and bytes are {sorted(map(str, scored))}" if len(scored) > 1 else ""
    yield verdict("all seeds scored the same text", fault, detail)
    yield same_script(folder)


def same_script(folder: Folder) -> Verdict:
    """Whether the script in the folder, packed or not, is the file that ran, by source and size."""
    rule = "train_gpt.py is the script that the logs show"
    shown = [run for run in folder.logs if run.source is not None]
    if not shown or folder.source is None:
        return Verdict("n/a", rule, "the logs do not begin with the script")
    source, fault = folder.source.strip(), ""
    size, counted = len(folder.code), {run.code_bytes for run in shown} - {None}
    beside = folder.path / make_record.READABLE
    if other := [run.path.name for run in folder.logs if (run.source or b"").strip() != source]:
        fault = f"{', '.join(other)} does not begin with it"
    elif counted - {size}:
        ran = " or ".join(map(str, sorted(counted)))
        fault = f"it has {size} bytes, the code that ran {ran}"
    elif beside.exists() and beside.read_bytes() != folder.source:
        fault = f"{beside.name} is not its source"
    return verdict(rule, fault, "packed, " * (folder.code != folder.source) + f"{size:,} bytes")


def limits(folder: Folder) -> Iterator[Verdict]:
    """Steps, bytes, seconds, machine."""
    yield length(folder)
    yield size_limit(folder)
    yield time_limit(folder, "training", {run.seed: run.train_seconds for run in folder.runs})
    yield time_limit(folder, "evaluation", {run.seed: run.eval_seconds for run in folder.runs})
    yield machine(folder)


def length(folder: Folder) -> Verdict:
    """No rule of the challenge, but a remark for who reads the score."""
    rule = f"every run has {FEW_STEPS} steps or more; the score of a shorter one says little"
    fewest = min((run.steps or 0 for run in folder.runs), default=0)
    detail = f"the shortest has {fewest}" if fewest else "the logs do not contain their steps"
    return Verdict("ok" if fewest >= FEW_STEPS else "n/a", rule, detail)


def size_limit(folder: Folder) -> Verdict:
    rule = "train_gpt.py and the artifact together have at most 16,000,000 bytes"
    sizes = {f"seed {run.seed}": run.model_bytes for run in folder.runs}
    if not sizes or None in sizes.values():
        return Verdict("n/a", rule, "the logs do not contain the artifact's size")
    code = len(folder.code or b"")
    name, largest = max(sizes.items(), key=lambda item: item[1])
    total = code + largest
    detail = f"{code:,} + {largest:,} = {total:,} ({name})"
    return verdict(rule, f"{detail}, {total - CAP:,} too many" if total > CAP else "", detail)


def time_limit(folder: Folder, what: str, times: dict[int | None, float | None]) -> Verdict:
    """The limit of training or evaluation. `times` are seconds by seed."""
    rule = f"{what} takes at most 10 minutes"
    unknown = [str(seed) for seed, time in times.items() if time is None]
    if unknown or not times:
        missing = ", ".join(unknown) or "there are none"
        return Verdict("n/a", rule, f"the logs do not contain it ({missing})")
    slow = [f"seed {seed}: {time:.2f} s" for seed, time in times.items() if time > SECONDS]
    resumed = " ".join(str(run.seed) for run in folder.runs if run.resumed)
    detail = f"{max(times.values()):.1f} s at most"
    if resumed and what == "training":
        detail += (
            f"; seed {resumed} was stopped and resumed, and steps lost by that are not counted"
        )
    return verdict(rule, "; ".join(slow), detail)


def machine(folder: Folder) -> Verdict:
    rule = 'training and evaluation ran "on 8xH100s"'
    found = make_record.hardware(folder.runs) if folder.runs else "no machine, as there are no logs"
    if folder.non_record:
        return Verdict("n/a", rule, f"a non-record; it ran on {found}")
    if not folder.runs or any(run.device is None or run.ranks is None for run in folder.runs):
        said = f"submission.json says {folder.submission.get('hardware', 'nothing')}"
        return Verdict("n/a", rule, f"the logs do not contain the machine; {said}")
    right = make_record.on_8xh100(folder.runs)
    return verdict(rule, "" if right else f"they ran on {found}", found)


def modules(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level packages that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


COMPILES = "train_gpt.py compiles"
STARTS = "train_gpt.py starts within the folder (--help)"
LISTED = "train_gpt.py imports what requirements.txt lists"
OFFLINE = '"no external downloads, training dataset access, or network calls ... during evaluation"'


def script(folder: Folder) -> Iterator[Verdict]:
    """Whether train_gpt.py compiles, starts, and imports only what it may."""
    if folder.source is None:
        for rule in (COMPILES, STARTS, LISTED, OFFLINE):
            yield Verdict("n/a", rule, "there is no train_gpt.py that can be read")
        return
    try:
        tree = ast.parse(folder.source)
    except (SyntaxError, ValueError) as error:
        yield Verdict("FAIL", COMPILES, str(error))
        return
    yield Verdict("ok", COMPILES, "")
    yield starts(folder)
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    packed = any(getattr(function, "id", "") in ("exec", "eval") for function in calls)
    if packed and len(tree.body) < 8:
        for rule in (LISTED, OFFLINE):
            yield Verdict("n/a", rule, "it executes code that an unknown packer has packed")
    else:
        yield from packages(folder, tree)


def packages(folder: Folder, tree: ast.Module) -> Iterator[Verdict]:
    """The imports of the script. It cannot run without those at its top; others may be optional."""
    at_top = [node.body if isinstance(node, ast.With) else [node] for node in tree.body]
    every, top = modules(ast.walk(tree)), modules(sum(at_top, []))
    path = folder.path / "requirements.txt"
    allowed, where = GIVEN, "the challenge's own requirements (the folder has none)"
    if path.exists():
        names = re.findall(r"(?m)^\s*([^\s=<>!~\[;#@]+)", path.read_text())
        allowed, where = {name.lower().replace("-", "_") for name in names}, "requirements.txt"

    def unlisted(found: set[str]) -> str:
        # triton comes with torch; "importing FlashAttention, etc. is completely fine"
        external = sorted(found - sys.stdlib_module_names - {"triton"})
        external = [name for name in external if not name.startswith("flash_attn")]
        return ", ".join(name for name in external if name.lower() not in allowed)

    fault = f"{unlisted(top)} is not in {where}" if unlisted(top) else ""
    detail = ", ".join(sorted(top - sys.stdlib_module_names))
    if optional := unlisted(every - top):
        detail += f"; imported where they are used, and not listed: {optional}"
    yield verdict(LISTED, fault, detail)
    network = ", ".join(sorted(every & NETWORK))
    detail = "it imports no module for it"
    if "kernels" in every:  # in the challenge's own requirements.txt
        detail += "; it may load a kernel from Hugging Face's hub (kernels): do so before the run"
    if "subprocess" in every:
        detail += "; it starts other programs (subprocess)"
    yield verdict(OFFLINE, f"it imports {network}" if network else "", detail)


def starts(folder: Folder) -> Verdict:
    """Run train_gpt.py --help in the folder."""
    command = [sys.executable, "-B", "train_gpt.py", "--help"]
    names = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    options = {"cwd": folder.path, "env": environment, "capture_output": True, "text": True}
    try:
        result = subprocess.run(command, **options, timeout=120)
    except subprocess.TimeoutExpired:
        return Verdict("FAIL", STARTS, "no answer within 120 s")
    if missing := re.search(r"No module named '([\w.]+)'", result.stderr):
        return Verdict("n/a", STARTS, f"{missing[1]} is not installed here")
    output = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
    fault = f"exit status {result.returncode}: {output[-1][:160]}"
    return verdict(STARTS, fault if result.returncode else "")


def significance(folder: Folder) -> Verdict:
    rule = 'a record "must beat the existing SOTA by at least 0.005 nats" at p < 0.01'
    advice = "compare it with the record to beat: tools/compare.py"
    return Verdict("n/a", rule, "a non-record" if folder.non_record else advice)


def probes(folder: Folder) -> Iterator[Verdict]:
    """The probes of tools/legality.py on the folder's own evaluation."""
    rule = "C1 causal, C2 normalised, C3 score before update, C4 once from left to right"
    ours = folder.source is not None and b"class Evaluator" in folder.source
    why = "its evaluation is not built like this project's"
    if ours and folder.runs and folder.runs[0].changed:
        module = legality.load(folder.source, folder.path / "train_gpt.py")
        why = "" if legality.fits(module) else "they are for a later version of the script"
    if why:
        yield Verdict("n/a", rule, f"the probes do not fit: {why}")
        return
    fault = legality.suite(module, folder.runs[0].configuration)
    yield verdict(rule, fault, "probed on a small model with the run's kinds of evaluation")


def check(folder: Folder, legality_probes: bool = False) -> list[Verdict]:
    """All verdicts."""
    parts = [files, same_figures, claims, one_configuration, limits, script]
    found = [line for part in parts for line in part(folder)] + [significance(folder)]
    return found + (list(probes(folder)) if legality_probes else [])


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("folder", type=Path)
    text = "probe the evaluation for the four conditions (30 s)"
    parser.add_argument("--legality", action="store_true", help=text)
    arguments = parser.parse_args()
    found = check(Folder(arguments.folder), arguments.legality)
    for status, rule, detail in found:
        print(f"{status:5} {rule}{': ' if detail else ''}{detail}")
    broken, other = (sum(line.status == status for line in found) for status in ("FAIL", "n/a"))
    rules = "1 rule is" if broken == 1 else f"{broken or 'no'} rules are"
    print(f"\n{rules} broken; {other} not checked or not applicable")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    program.run_program(main)
