"""Read the text logs of runs: ours and those of the challenge's published scripts, in two formats:
`step:200/9000 train_loss:2.43 train_time:16305ms` with `..._exact val_loss:... val_bpb:...` (#399
and its relatives), and `200/9000 train_loss: 2.43 train_time: 0.3m`."""

import contextlib
import dataclasses
import functools
import glob
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from train_gpt import CUT, Hyperparameters, UserError, as_user_error, knobs_with, require

SEPARATOR = "=" * 100  # separates the source at the top of a log from the rest
KNOBS = {field.name.upper() for field in dataclasses.fields(Hyperparameters)}
# These do not change what a run computes.
WITHOUT_EFFECT = {"RESUME", "CHECKPOINT_EVERY", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY"}
# Runs that differ in one of these are different experiments. Published logs list other names too;
# those are ignored.
CONFIGURATION = KNOBS - {"SEED", "RUN_ID"} - WITHOUT_EFFECT | {"WORLD_SIZE"}
# What an evaluation decides; all else is the training's.
SCORING = {name.upper() for name in knobs_with("score")}
DAMAGED = "damaged"  # the event of a line that is none
UNEVEN = 0.1  # of the most steps; a wider range in one group is worth a warning

NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
STEP = re.compile(r"^(?:step:)?(\d+)/(\d+) (?=train_loss|val_loss)(.*)")
FIELD = re.compile(r"(\w+): ?" + NUMBER + r"(ms|m|s)?(?![\w.])")
NAME = r"([A-Za-z][\w .-]*?)(?:_exact)?:?(?: stride:\d+)?"  # of a score
SCORE = re.compile(rf"^{NAME} val_loss[:=] ?{NUMBER} val_bpb[:=] ?{NUMBER}(.*)")
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


class Unfinished(UserError):
    """A log without steps, or of a run that did not finish."""


class Point(NamedTuple):
    """One logged step."""

    step: int
    seconds: float | None  # of training; some logs do not contain it
    fields: dict[str, float]


class Score(NamedTuple):
    """A final score. `seconds`, `tokens` and `nbytes` are None if the log does not contain them."""

    loss: float  # nats per token
    bpb: float
    seconds: float | None
    tokens: int | None
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of one log. A field is None if the log does not contain it."""

    path: Path
    source: bytes | None  # readable source of the script
    settings: dict[str, str]  # knobs by variable name; for published logs, everything they list
    changed: tuple[str, ...]  # knobs that the log marks as different from the default
    started: str | None  # YYYY-MM-DDTHH:MM:SSZ
    versions: dict[str, str]
    device: str | None
    ranks: int | None
    train: list[Point]
    val: list[Point]
    steps: int | None
    train_seconds: float | None
    step_seconds: float | None  # of these without calibration
    resumed: int  # how many times the run was resumed
    finished: bool  # to the end of its evaluation
    val_tokens: int | None  # targets of the validation text
    scores: dict[str, Score]  # by name, in log order
    model_bytes: int | None
    code_bytes: int | None
    total_bytes: int | None
    prepare_seconds: float | None  # of text and artifact, before an evaluation
    artifact: str | None  # its sha256
    evaluation: "Run | None" = None  # of its artifact, by EVAL_ONLY: the scores that count

    @property
    def logs(self) -> list["Run"]:
        """The run, and the evaluation of its artifact if that has a log of its own."""
        return [self, self.evaluation] if self.evaluation else [self]

    @property
    def eval_seconds(self) -> float | None:
        """Of the score that counts, with all that it needs: text, hints and artifact."""
        seconds = self.score.seconds
        return None if seconds is None else seconds + (self.logs[-1].prepare_seconds or 0.0)

    @property
    def changes(self) -> dict[str, str]:
        """The values of the knobs that the logs mark as different from the default."""
        return {
            name: run.settings[name]
            for run in self.logs
            for name in run.changed
            if not self.evaluation or (name in SCORING) == (run is self.evaluation)
        }

    @property
    def seed(self) -> int | None:
        text = self.settings.get("SEED", "")
        return int(text) if text.isdigit() else None

    @property
    def configuration(self) -> dict[str, str]:
        """The settings that define the experiment."""
        ranks = {} if self.ranks is None else {"WORLD_SIZE": str(self.ranks)}
        found = {name: value for name, value in self.settings.items() if name in CONFIGURATION}
        if self.evaluation:
            given = self.evaluation.configuration
            found |= {name: given[name] for name in SCORING & given.keys()}
        return found | ranks

    @property
    def experiment(self) -> dict[str, str]:
        """The configuration; of two logs, what of each it leaves out as well."""
        if not self.evaluation:
            return self.configuration
        own = {f"{name} of its training": self.settings.get(name, "") for name in SCORING}
        return self.configuration | own | {"WORLD_SIZE of its score": str(self.evaluation.ranks)}

    @property
    def score_name(self) -> str | None:
        """Of the score that counts: test-time training, else sliding windows, else the last."""
        names = [name for name in reversed(self.scores) if not is_before_export(name)]
        names = [name for name in names if "diagnostic" not in name.lower()]
        found = (name for part in ("ttt", "sliding", "") for name in names if part in name)
        return next(found, None)

    @property
    def score(self) -> Score:
        """The score that counts. Raises Unfinished, or UserError if it is not finite."""
        if not self.finished or self.score_name is None:
            why = "the run did not finish; run it again or leave it out"
            raise Unfinished(f"{self.path} has no final score: {why}")
        score = self.scores[self.score_name]
        # Left out, a run that diverged would improve the mean.
        finite = math.isfinite(score.loss) and 0 < score.bpb < math.inf
        require(finite, f"{self.path} has the score {score.bpb}: it cannot be compared")
        return score

    @property
    def fault(self) -> str:
        """Why it has no score that can be compared, or ""."""
        try:
            self.score  # noqa: B018  raises
            return ""
        except UserError as error:
            return str(error)

    @property
    def before_export(self) -> Score | None:
        """The score of the weights before quantisation."""
        return next((score for name, score in self.scores.items() if is_before_export(name)), None)

    @property
    def after_export(self) -> Score | None:
        """The score of the artifact with non-overlapping windows."""
        known = ("roundtrip", "diagnostic quantized")
        parts = (score for name, score in self.scores.items() if any(p in name for p in known))
        return next(parts, None)

    @property
    def step_ms(self) -> float | None:
        """Mean milliseconds per step, without calibration."""
        return 1000 * self.step_seconds / self.steps if self.steps and self.step_seconds else None


def is_before_export(name: str) -> bool:
    """Whether the score of this name is of weights before quantisation."""
    return bool(re.search("average|post[_-]ema|pre-?quant", name.lower()))


def read_run(path: Path) -> Run:
    """The run in a text log. Raises UserError if there is none (Unfinished) or several."""
    source, lines = _read_lines(path)
    text = "\n".join(lines)
    resumes = [place for place, line in enumerate(lines) if line.startswith("resumed: ")]
    # A run that was stopped in its evaluation and resumed scores again.
    last = lines[resumes[-1] :] if resumes else lines
    train, val = _points(path, lines)
    scores = _scores(last)
    if not (train or val or scores):
        advice = "give logs/<RUN_ID>.txt or train_seed<N>.log"
        raise Unfinished(f"{path} has neither steps nor scores; {advice}")
    settings, changed = _settings(lines)
    steps = [point.step for point in (*train, *val)]
    seconds = [point.seconds for point in (*train, *val) if point.seconds is not None]
    ends = re.findall(r"^(stopping_early|calibration|gptq): .*train_time: ?([\d.]+)ms", text, re.M)
    seconds += [float(ms) / 1000 for name, ms in ends if name == "stopping_early"]
    with_calibration = [*seconds, *(float(ms) / 1000 for _, ms in ends)]

    def find(pattern: str) -> str | None:
        found = re.search(pattern, text, re.M)
        return found and found[1].strip()

    prepared = re.findall(r"^evaluation: .*prepare_time:(\d+)ms", text, re.M)
    digests = re.findall(r"^(?:Serialized model|artifact).* sha256:(\w+)$", text, re.M)
    ours = find(r"^runtime: ranks:(\d+)")
    return Run(
        path=path,
        source=source,
        settings=settings,
        changed=changed,
        started=find(r"^started: (\S+)$"),
        versions=_versions(lines),
        device=find(r"^runtime: .*?device:(.*?) compute_dtype:")
        or find(r"(NVIDIA [A-Z]+\d+[^|\n]*?)  "),
        ranks=_int(ours or find(r"^\s*world_size: ?(\d+)")),
        resumed=len(resumes),
        # The logs of other scripts end with their scores.
        finished=not ours or any(line.startswith("finished: ") for line in last),
        val_tokens=_int(find(r"^model_params:.*? val_tokens:(\d+)")),
        train=train,
        val=val,
        steps=max(steps, default=None),
        train_seconds=max(with_calibration, default=None),
        step_seconds=max(seconds, default=None),
        scores=scores,
        model_bytes=_last_size(text, "Serialized model [^:\n]+"),
        code_bytes=_last_size(text, "Code size[^:\n]*"),
        total_bytes=_last_size(text, "Total submission size[^:\n]*"),
        prepare_seconds=float(prepared[-1]) / 1000 if prepared else None,
        artifact=digests[-1] if digests else None,
    )


def read_events(path: Path) -> list[dict]:
    """The events of a run's log of JSON lines, without damaged ones, with a note."""
    with as_user_error(f"cannot read {path}", "give the logs/<RUN_ID>.jsonl of a run", Exception):
        lines = path.read_bytes().splitlines()
        events = [event for event in map(parse_event, lines) if event["event"] != DAMAGED]
        begins = events and "hyperparameters" in events[0]
        require(begins, "it does not begin with a run's settings")
    note_damage(path, len(lines) - len(events))
    return events


def parse_event(line: bytes) -> dict:
    """The event of a line; DAMAGED if a crash or a full disk has cut it."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    return {"event": DAMAGED}


@functools.cache
def note_damage(path: Path, count: int) -> None:
    """Say, once, how many lines of a log are left out."""
    if count:
        cause = "cut by a crash or a full disk"
        print(f"left out: damaged lines of {path}: {count}, {cause}", file=sys.stderr)


def is_damaged(line: str) -> bool:
    """Whether the line was cut, as a resumed run has marked it, or is a step without its loss."""
    step = STEP.match(line)
    return line.endswith(CUT.rstrip()) or bool(
        step and not {"train_loss", "val_loss"} & _fields(step[3]).keys()
    )


def _read_lines(path: Path) -> tuple[bytes | None, list[str]]:
    """(source of the script if the log begins with it, the other lines)."""
    advice = "give the text log of a run, logs/<RUN_ID>.txt"
    with as_user_error(f"cannot read {path}", advice, OSError):
        blob = path.read_bytes()
    instead = f"{path} is not a text log; give {path.with_suffix('.txt').name} instead"
    require(path.suffix not in (".jsonl", ".json"), instead)
    head, separator, rest = blob.partition(f"\n{SEPARATOR}\n".encode())
    source, body = (head, rest) if separator else (None, blob)
    lines = body.decode("utf-8", errors="replace").splitlines()
    # nanogpt's logs have a second separator, below the versions.
    lines = [line for line in lines if line != SEPARATOR]
    whole = [line for line in lines if not is_damaged(line)]
    if b"\nruntime: ranks:" in body and body[-1:] != b"\n" and whole[-1:] == lines[-1:]:
        whole.pop()  # of a killed run of ours; other logs may lack the last end of a line
    note_damage(path, len(lines) - len(whole))
    return source, whole


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _last_size(text: str, what: str) -> int | None:
    """The size on the last of these lines: published logs give the raw size first."""
    found = re.findall(rf"^{what}: (\d+) bytes", text, re.M)
    return int(found[-1]) if found else None


def _fields(text: str) -> dict[str, float]:
    """The key:value pairs of a line, times in seconds."""
    found = FIELD.findall(text)
    return {key: round(float(value) * SECONDS[unit], 9) for key, value, unit in found}


def _points(path: Path, lines: list[str]) -> tuple[list[Point], list[Point]]:
    """Training and validation steps, in order. Of a step that a resumed run repeats, the last."""
    found: dict[str, dict[int, Point]] = {"train_loss": {}, "val_loss": {}}
    last = -1
    for line in lines:
        if match := re.match(r"^resumed: step:(\d+) ", line):
            last = int(match[1])
            for points in found.values():
                for later in [step for step in points if step > last]:
                    del points[later]
        if not (match := STEP.match(line)):
            continue
        step = int(match[1])
        fields = _fields(match[3])
        again = f"{path} holds several runs (step {step} follows step {last})"
        require(step >= last, f"{again}: give each run its own log")
        last = step
        kind = "train_loss" if "train_loss" in fields else "val_loss"
        found[kind][step] = Point(step, fields.get("train_time"), fields)
    return list(found["train_loss"].values()), list(found["val_loss"].values())


def _scores(lines: list[str]) -> dict[str, Score]:
    """Final scores. A rounded and an `_exact` line are one score; either may have the time."""
    scores: dict[str, Score] = {}
    for line in lines:
        if match := SCORE.match(line):
            name, loss, bpb, rest = match.groups()
            name = name.strip()
            if "partial" in name:  # what older scripts had scored when they were interrupted
                continue
            fields = _fields(rest)
            seconds = fields.get("eval_time", scores[name].seconds if name in scores else None)
            counts = [int(fields[k]) if k in fields else None for k in ("val_tokens", "val_bytes")]
            scores[name] = Score(float(loss), float(bpb), seconds, *counts)
    return scores


def _settings(lines: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(knobs, names of those marked as changed)."""
    matches = (re.match(r"^([* ]) ([A-Z][A-Z0-9_]+)=(.*)$", line) for line in lines)
    if ours := [match.groups() for match in matches if match]:
        changed = tuple(name for mark, name, _ in ours if mark == "*")
        return {name: value for _, name, value in ours}, changed
    found = {}
    for line in lines:
        if match := re.match(r"^  ([a-z]\w*): (.*)$", line):  # a list of hyperparameters
            found[match[1].upper()] = match[2]
        elif STEP.match(line) or SCORE.match(line):
            continue
        elif re.fullmatch(r"(\w+:\S+ )*\w+:\S+", line):  # "name:value name:value"
            for pair in line.split():
                key, _, value = pair.partition(":")
                found[key.upper()] = value
    return found, ()


def _versions(lines: list[str]) -> dict[str, str]:
    for line in lines:
        if line.startswith("python ") and ", torch " in line:
            return dict(part.split(" ", 1) for part in line.split(", "))
        if match := re.match(r"^Running PyTorch (\S+)", line):
            return {"torch": match[1]}
    return {}


def read_logs(texts: list[str]) -> tuple[list[Run], str]:
    """(the runs in these logs (`find_logs`), a sentence on the logs without a step). Raises
    UserError if all are without."""
    paths = {path.resolve(): path for text in texts for path in find_logs(text)}
    members, failed = _finished(read_run, paths.values())
    if not members:
        raise failed[0]
    more = f" (and {len(failed) - 1} more such logs)" if len(failed) > 1 else ""
    return members, f"left out: {failed[0]}{more}" if failed else ""


def _finished(read: Callable, given: Iterable) -> tuple[list, list[Unfinished]]:
    """(what `read` makes of each, the errors of those that did not finish)."""
    found, failed = [], []
    for one in given:
        try:
            found.append(read(one))
        except Unfinished as error:
            failed.append(error)
    return found, failed


def with_evaluations(members: list[Run]) -> list[Run]:
    """The runs. An evaluation (EVAL_ONLY) of an artifact that one of them has made, by its sha256, is
    joined with it: its scores count. Raises UserError if there are two of one artifact."""
    trained = {run.artifact for run in members if not run.settings.get("EVAL_ONLY")} - {None}
    found: dict[str | None, Run] = {}
    for run in members:
        if run.finished and run.settings.get("EVAL_ONLY") and run.artifact in trained:
            other = found.get(run.artifact)
            twice = f"{other and other.path} and {run.path} score one artifact"
            require(not other, f"{twice}: give one of them")
            found[run.artifact] = run
    return [
        joined(run, found[run.artifact]) if run.artifact in found else run
        for run in members
        if found.get(run.artifact) is not run
    ]


def joined(run: Run, evaluation: Run) -> Run:
    before = {name: score for name, score in run.scores.items() if is_before_export(name)}
    scores = before | evaluation.scores
    return dataclasses.replace(run, finished=True, scores=scores, evaluation=evaluation)


def read_group(text: str) -> list[Run]:
    """The runs of a group of logs (`find_logs`). Those that did not finish are left out, with a
    note. Raises UserError if none is left, if a seed occurs twice, or if they have different
    configurations or kinds of scores."""
    read, failed = _finished(read_run, find_logs(text))
    pairs, unscored = _finished(lambda run: (run, run.score), with_evaluations(read))
    members, failed = [run for run, _ in pairs], failed + unscored
    if not members:
        raise failed[0]
    for error in sorted(failed, key=str):
        print(f"left out: {error}", file=sys.stderr)
    mixed = f"the logs of {text} mix configurations: {differences(members)}"
    require(not differences(members), f"{mixed}; give the logs of one configuration")
    seeds = [run.seed for run in members if run.seed is not None]
    for seed in set(seeds):
        twice = f"the logs of {text} have seed {seed} more than once; give one log per seed"
        require(seeds.count(seed) == 1, twice)
    return members


def find_logs(text: str) -> list[Path]:
    """The logs of a folder, a log, a pattern, or several of these separated by commas. Raises
    UserError if a folder or a pattern has none."""
    if Path(text).is_file():
        return [Path(text)]
    if "," in text:
        return [path for part in text.split(",") for path in find_logs(part)]
    if Path(text).is_dir():
        files = [path for path in sorted(Path(text).iterdir()) if path.name != "requirements.txt"]
    elif any(char in text for char in "*?["):
        files = [Path(name) for name in sorted(glob.glob(text))]
    else:
        return [Path(text)]  # reading it will fail and say why
    found = [path for path in files if path.suffix in (".log", ".txt")]
    advice = "give a folder of logs, a log, or a pattern like 'logs/a_*.txt'"
    require(found, f"there are no logs in {text}; {advice}")
    return found


def differences(members: list[Run]) -> str:
    """A description of how the runs differ beside their seeds, or "" if they do not."""
    for run in members[1:]:
        a, b = members[0].experiment, run.experiment
        names = f"{members[0].path.name} and {run.path.name}"
        unlike = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)][:4]
        values = [f"{n}={a.get(n, 'not set')} and {b.get(n, 'not set')}" for n in unlike]
        if unlike:
            return f"{names} have {'; '.join(values)}"
        sources = {log.source for one in (members[0], run) for log in one.logs} - {None}
        if len(sources) > 1:
            return f"{names} begin with different scripts"
        kinds = [one.score_name for one in (members[0], run) if one.finished and one.score_name]
        if len(set(kinds)) > 1:
            return f"{names} have the scores {' and '.join(map(str, kinds))}"
    return ""


def uneven_steps(members: list[Run]) -> str:
    """A warning if the runs of a group differ much in their steps, else ""."""
    counts = [run.steps for run in members if run.steps]
    if not counts or min(counts) >= (1 - UNEVEN) * max(counts):
        return ""
    return (
        f"warning: these runs have {min(counts)} to {max(counts)} steps, so their scores differ by "
        "the machine's speed too: repeat them on an idle machine or with equal ITERATIONS"
    )


def mean_std(values: list[float]) -> tuple[float, float | None]:
    """(mean, sample standard deviation); the latter is None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


COLUMNS = (  # title, format, how to read it
    ("steps", ".0f", lambda run: run.steps),
    ("ms/step", ".2f", lambda run: run.step_ms),
    ("before", ".5f", lambda run: run.before_export and run.before_export.bpb),
    ("after", ".5f", lambda run: run.after_export and run.after_export.bpb),
    ("score", ".5f", lambda run: run.score.bpb),
    ("bytes", ",.0f", lambda run: run.total_bytes),
    ("train s", ".1f", lambda run: run.train_seconds),
    ("eval s", ".1f", lambda run: run.eval_seconds),
)


def cell(value: float | None, form: str, unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)


def aligned(rows: list[list[str]]) -> str:
    """Rows of equally many cells as text: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = "<" + ">" * (len(widths) - 1)
    layout = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(layout.format(*row) for row in rows)


def rows(
    members: list[Run], names: list[str], columns: Sequence = COLUMNS, unknown: str = "-"
) -> list[list[str]]:
    """A row of cells for each run, even if it did not finish, then mean and standard deviation of
    the columns that all runs have."""
    several, finished = len(members) > 1, {"score", "eval s"}
    cells = [[*names, "mean", "std"] if several else names]
    for title, form, read in columns:
        values = [None if title in finished and run.fault else read(run) for run in members]
        if several:
            values += (None, None) if None in values else mean_std(values)
        cells.append([cell(value, form, unknown) for value in values])
    return [list(row) for row in zip(*cells, strict=True)]


def table(members: list[Run], names: list[str] | None = None) -> str:
    """The rows of these runs as text."""
    names = names or [run.path.stem for run in members]
    head = ["", *(title for title, *_ in COLUMNS)]
    last = ["n", str(len(members)), *[""] * (len(COLUMNS) - 1)]
    text = aligned([head, *rows(members, names), last]).rstrip()
    return "\n".join([text, *filter(None, [uneven_steps(members)])])
