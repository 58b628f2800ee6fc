"""tools/make_record.py and tools/check_record.py: submission folders and their check."""

import dataclasses
import functools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import check_record
import make_record
import pack_code
import train_gpt
from conftest import ROOT, run, user_error
from lib import runs
from sample_logs import LATER, LEGAL, PUBLISHED, counted, logs_of, written


@pytest.fixture
def made(swept, tmp_path, monkeypatch):
    """A function: a submission folder made from the sweep's logs, with its README filled in."""
    monkeypatch.setattr(make_record, "ROOT", tmp_path)

    def make(change=lambda text: text, track="non_record_16mb", github="--github-id ada") -> Path:
        for path in logs_of(swept):
            written(tmp_path / "logs", change(path.read_text()), path.name)
        about = ["--name", "A tiny, first one", "--author", "Ada", "--track", track]
        about += [*github.split(), f"{tmp_path}/logs/*.txt"]
        monkeypatch.setattr(sys, "argv", ["make_record.py", *about])
        make_record.main()
        folder = next((tmp_path / "records" / f"track_{track}").iterdir())
        damage(folder, "README.md", r"\(to fill: .*\)", "none", count=0)
        return folder

    return make


def given_in(folder: Path) -> dict:
    return json.loads((folder / "submission.json").read_text())


def checked(folder: Path, starts=False) -> dict[str, str]:
    """What check_record.py finds, by verdict. To start the script takes seconds: only if it matters."""
    start = check_record.starts if starts else lambda _: check_record.Verdict("ok", "", "")
    with mock.patch.object(check_record, "starts", start):
        lines = check_record.check(check_record.Folder(folder))
    assert len(lines) > 10
    found = dict.fromkeys(("ok", "FAIL", "n/a"), "")
    for status, rule, detail in lines:
        found[status] += f"{rule}: {detail}\n"
    return found


FILES = "README.md requirements.txt submission.json train_gpt.py train_seed1.log train_seed2.log"


def test_a_folder_has_everything_from_the_logs(made, swept):
    folder = made(lambda text: text.replace("* DATA_PATH=", "* DATA_PATH=a b/", 1))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_A_tiny_first_one", folder.name)
    assert sorted(p.name for p in folder.iterdir()) == FILES.split()
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    found, given = [runs.read_run(path) for path in logs_of(swept)], given_in(folder)
    bpb, nats = ([getattr(r.score, name) for r in found] for name in ("bpb", "loss"))
    figures = {"val_bpb": np.mean(bpb), "val_loss": np.mean(nats)}
    figures |= {"val_bpb_std": np.std(bpb, ddof=1)}
    figures |= {"bytes_total": max(r.total_bytes for r in found)}
    assert {name: given[name] for name in figures} == pytest.approx(figures, abs=1e-8)
    assert given["seed_results"]["2"]["val_loss"] == nats[1]
    facts = {"seeds": [1, 2], "attribution": "descends from #399 by abaybektursun"}
    facts |= {"github_id": "ada", "track": "non_record_16mb"}  # the folder is called track_...
    claims = {"three_seeds": False} | dict.fromkeys(make_record.ABSENT, True)
    assert facts.items() <= given.items() and claims.items() <= given["compliance"].items()
    text = (folder / "README.md").read_text()
    command = "NUM_LAYERS=3 LATE_QAT=1 VAL_LOSS_EVERY=4 TRAIN_LOG_EVERY=2 OMP_NUM_THREADS=1"
    for part in ("This is not a record", "DATA_PATH='a b/", *command.split()):
        assert part in text
    assert f"**val_bpb {given['val_bpb']:.5f}**" in text
    pins = (folder / "requirements.txt").read_text()
    assert f"torch=={train_gpt.torch.__version__.split('+')[0]}\n" in pins


def test_a_good_folder_passes(made):
    folder = made()
    command = [ROOT / "tools" / "check_record.py", folder, "--legality"]
    text = run(command, {}, folder.parent).stdout
    assert text.count("\nn/a ") == 3 and ": the shortest has 12\n" in text
    assert '\nn/a   training and evaluation ran "on 8xH100s": a non-record' in text
    assert text.count("\nok ") > 10 and "\nok    C1 causal" in text
    assert sorted(p.name for p in folder.iterdir()) == FILES.split(), "the check leaves nothing"


def test_the_packed_script_that_ran_is_submitted(made, monkeypatch):
    """It and its source belong together. Packing takes seconds, so it is done once."""
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    packed, other = pack_code.pack(source), pack_code.pack(b"x = 1")
    monkeypatch.setattr(pack_code, "pack", {source: packed}.get)
    folder = made(counted(len(packed), source))
    assert (folder / "train_gpt.py").read_bytes() == packed
    assert (folder / "train_gpt.readable.py").read_bytes() == source
    assert given_in(folder)["bytes_code"] == len(packed)
    found, shown = checked(folder, starts=True), f"the logs show: packed, {len(packed):,} bytes\n"
    assert not found["FAIL"] and f"train_gpt.py is the script that {shown}" in found["ok"]
    for name, content, part in (
        ("train_gpt.readable.py", source + b"x", "train_gpt.readable.py is not its source"),
        ("train_gpt.py", source, f"it has {len(source)} bytes, the code that ran {len(packed)}"),
        ("train_gpt.py", other, "does not begin with it"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        line = check_record.same_script(check_record.Folder(folder))
        assert line.status == "FAIL" and part in line.detail
        (folder / name).write_bytes(before)
    shutil.rmtree(folder)
    with user_error("the script was not packed with tools/pack_code.py"):
        made(counted(len(packed) + 1, source))


def on_h100s(log: Path, **changes) -> runs.Run:
    return dataclasses.replace(runs.read_run(log), ranks=8, device="NVIDIA H100", **changes)


def test_a_claim_is_about_every_seed(swept):
    """Not about the first one alone."""
    first, second = map(on_h100s, logs_of(swept))
    slow = {second.score_name: second.score._replace(seconds=600.1)}
    for claim, worse in {
        "artifact_under_16mb": {"model_bytes": make_record.CAP},
        "train_under_600s": {"train_seconds": 600.1},
        "eval_under_600s": {"scores": slow},
        "hardware_8xh100": {"ranks": 4},
    }.items():
        pair = [first, dataclasses.replace(second, **worse)]
        for given, holds in (([first, second], True), (pair, False), (pair[::-1], False)):
            assert make_record.summary(given, 1)["compliance"][claim] is holds, claim
    larger = dataclasses.replace(second, model_bytes=9**9)
    assert make_record.summary([first, larger], 1)["bytes_total"] == 9**9 + 1


def test_a_record_needs_its_machine(made):
    """It is told how to show its significance."""
    form, h100 = r"(?m)^runtime: ranks:1 (.*?) device:.*?(?= compute)", "NVIDIA H100 80GB HBM3"
    as_record = functools.partial(re.sub, form, rf"runtime: ranks:8 \1 device:{h100}")
    found = checked(made(as_record, track="10min_16mb"))
    assert not found["FAIL"] and re.search(r"\na record .*compare\.py", found["n/a"])


JSON, LOG1, LOG2, CODE = "submission.json", "train_seed1.log", "train_seed2.log", "train_gpt.py"
IMPORT = "^import argparse$"
BROKEN = [  # (files, old or None: all, new or None: removed, part of a verdict)
    (JSON, '(?<="no_ngram_cache": )true', "false", "no_ngram_cache is False, not true"),
    (JSON, '(?<="attribution": )".*"', "399", "attribution is 399, not a text"),
    (JSON, "non_record_16mb", "10min_16mb", "they ran on CPU"),
    (JSON, r"\{", "{,", "submission.json cannot be read: Expecting"),
    (JSON, '(?<="author": )".*"', '""', "without author"),
    (JSON, r'("val_loss": ).*(,\s*"val_bpb": )([\d.]+)', r"\1\3\2\3", "val_loss is nats per token"),
    (JSON, r',\s*"2": \{[^}]*\}', "", "seed_results lacks seed 2"),
    (JSON, None, None, "no submission.json"),
    ("README.md", None, None, "no README.md"),
    ("README.md", "none", "(to fill: x)", "still to fill"),
    ("*.log", None, None, "no log (train"),
    (LOG2, None, None, "seed_results has seed 2, which has no log"),
    (LOG1, r"final_int6_\w+_exact.*\n.*", "", "did not finish"),
    (LOG2, r"^[* ] MATRIX_LR=0\.025", "* MATRIX_LR=0.03", "MATRIX_LR=0.025 and 0.03"),
    (LOG2, r"^\* SEED=2", "* SEED=1", "one occurs twice"),
    (LOG2, r"(final_int6_sl.*)val_tokens:\d+", r"\1val_tokens:99", "tokens and bytes are"),
    (LOG2, r"^Code size: \d+", "Code size: 5", "that ran 5 or"),
    (LOG2, f"(?s)^.*?{runs.SEPARATOR}", "", "train_seed2.log does not begin with it"),
    (LOG2, r"^(Serialized model int6.*:) \d+", r"\1 16000000", "(seed 2), "),
    (LOG2, r"^(calibration: .*train_time):\d+ms", r"\1:600001ms", "seed 2: 600.00 s"),
    (LOG1, r"(final_int6_sl.*)eval_time:\d+ms", r"\1eval_time:700000ms", "seed 1: 700."),
    (LOG1, r"prepare_time:\d+ms", "prepare_time:600000ms", "seed 1: 60"),
    (LOG1, "^  NGRAM_TILT=False", "* NGRAM_TILT=True", "no_ngram_cache of compliance is True"),
    (LOG2, "^changed from", f"HF_TOKEN=hf_{'a1' * 18}\nchanged from", "key or password"),
    (CODE, None, None, "no train_gpt.py"),
    (CODE, None, b"#" * 15_999_000, "too many"),  # with the artifact, which is below the limit
    (CODE, None, pack_code.pack(b"pass")[:-60], "cannot be read: the packed script is incomplete"),
    (CODE, IMPORT, "import argparse  # changed", "does not begin with it"),
    (CODE, IMPORT, "import argparse argparse", "invalid syntax"),
    (CODE, r"^    main\(\)$", '    sys.exit("error: no")', "exit status 1: error: no"),
    (CODE, IMPORT, "import argparse\nimport pytest", "pytest is not in requirements.txt"),
    (
        CODE,
        IMPORT,
        "import argparse\nwith x():\n    import tqdm",
        "tqdm is not in requirements.txt",
    ),
    (CODE, IMPORT, "import argparse\nimport urllib.request", "it imports urllib"),
]


def damage(folder: Path, files: str, old: str | None, new: str | bytes | None, count=1) -> None:
    for path in folder.glob(files):
        if new is None:
            path.unlink()
        elif old is None:
            path.write_bytes(new)
        else:
            text = path.read_text()
            path.write_text(re.sub(old, new, text, count=count, flags=re.M))
            assert path.read_text() != text


def state(folder: Path, **changes) -> None:
    """Change fields of submission.json."""
    (folder / JSON).write_text(json.dumps(given_in(folder) | changes))


def test_each_breakage_is_found(made, tmp_path):
    good = made()
    for *how, part in BROKEN:
        folder = shutil.copytree(good, tmp_path / "broken")
        damage(folder, *how)
        assert part in checked(folder, starts="exit status" in part)["FAIL"], part
        shutil.rmtree(folder)


def altered(given: dict) -> Iterator[tuple[str, dict]]:
    """Each entry of submission.json that the logs decide, and the file with another value of it."""
    theirs = {"author", "github_id", "name", "track", "attribution", "technique_summary"}
    other = {bool: lambda x: not x, str: "0{}".format, list: lambda x: [*x, 9]}
    for key, value in given.items():
        if isinstance(value, dict):
            yield from ((name, {**given, key: inner}) for name, inner in altered(value))
        elif key not in theirs:
            yield key, {**given, key: other.get(type(value), lambda x: 1.01 * x)(value)}


def test_each_statement_is_contradicted_by_the_logs(made):
    """All that submission.json says, but what its author says."""
    folder = made()
    given = given_in(folder)
    compliance = given["compliance"] | {"score_first_ttt": True}
    summary = given["technique_summary"].replace("NUM_LAYERS=3", "NUM_LAYERS=4")
    cases = [*altered(given), ("score_first_ttt", given | {"compliance": compliance})]
    cases.append(("technique_summary", given | {"technique_summary": summary}))
    assert len(cases) > 40
    for entry, wrong in cases:
        state(folder, **wrong)
        (found,) = check_record.same_figures(check_record.Folder(folder))
        assert found.status == "FAIL" and entry in found.detail, (entry, found)


def test_a_figure_is_right_in_all_its_digits():
    for given, right in ((1.1194, True), (1.1195, False), (1.119381, False), (1.12, False)):
        assert check_record.close(given, 1.11938, 4) is right, given


def test_a_run_with_the_tilt_says_that_it_counts_n_grams(made):
    """It said that it does not, and its hints took no time, which is limited."""

    def tilted(text: str) -> str:
        """The hints take 29 s, the score 590."""
        text = text.replace("  NGRAM_TILT=False", "* NGRAM_TILT=True")
        text = re.sub(r"(final_int6_sl.*eval_time:)\d+", r"\g<1>590000", text)
        return re.sub(r"prepare_time:\d+ms", "prepare_time:29000ms", text)

    folder = made(tilted)
    given = given_in(folder)
    assert given["compliance"]["no_ngram_cache"] is given["compliance"]["eval_under_600s"] is False
    assert [row["eval_time_s"] for row in given["seed_results"].values()] == [619, 619]
    found = checked(folder)
    assert "no_ngram_cache is False, as NGRAM_TILT=1" in found["n/a"]
    assert found["FAIL"].count("\n") == 1 and "seed 1: 619.00 s" in found["FAIL"]
    state(folder, compliance=given["compliance"] | {"no_slot": False})
    (found,) = check_record.claims(check_record.Folder(folder))
    assert found.status == "FAIL" and found.detail == "no_slot is False, not true"


def test_what_the_logs_do_not_show_is_left_to_the_author(made):
    """Whether a changed script has SLOT, for example: it said that it has not. And the GitHub ID, which
    was the author's name."""
    source = (ROOT / "train_gpt.py").read_bytes() + b"changed = 1\n"
    folder = made(counted(len(source), source), github="")
    given = given_in(folder)
    unknown = dict.fromkeys(make_record.ABSENT, make_record.UNKNOWN)
    assert given["compliance"].items() >= unknown.items()
    assert (given["author"], given["github_id"]) == ("Ada", "(to fill: your GitHub ID)")
    detail = "no_slot is '(to fill: true or false; the logs do not show it, as of a changed script"
    found = checked(folder)["FAIL"]
    assert detail in found and "without github_id\n" in found
    stated = given["compliance"] | dict.fromkeys(make_record.ABSENT, True)
    state(folder, compliance=stated, github_id="ada")
    assert not checked(folder)["FAIL"]


def test_a_score_of_its_own_belongs_to_the_submission(swept, sweep_knobs, tmp_path, monkeypatch):
    """A training without test-time training and the EVAL_ONLY score of its artifact."""
    training = logs_of(swept)[0]
    knobs = {"EVAL_ONLY": str(training.with_suffix(".npz")), "RUN_ID": "score", "TTT_ENABLED": "1"}
    run([ROOT / "train_gpt.py"], {**sweep_knobs, **knobs}, tmp_path)
    scored = tmp_path / "logs" / "score.txt"
    one, two = runs.read_run(training), runs.read_run(scored)
    assert one.artifact == two.artifact != runs.read_run(logs_of(swept)[1]).artifact
    monkeypatch.setattr(make_record, "ROOT", tmp_path)
    make = functools.partial(make_record.make, track="non_record_16mb")
    about = dict(author="Ada", github_id="ada", name="Two logs")
    folder = make([two, one], about)
    damage(folder, "README.md", r"\(to fill: .*\)", "none", count=0)
    text = (folder / "README.md").read_text()
    assert f"EVAL_ONLY={training.stem}.npz" in text and "TTT_ENABLED=1" in text.split("Then for")[1]
    assert {"train_seed1.log", "eval_seed1.log"} < {path.name for path in folder.iterdir()}
    given = given_in(folder)
    assert given["eval_method"] == "final_int6_ttt_sgd" and given["val_bpb"] == two.score.bpb
    row = given["seed_results"]["1"]
    assert (row["steps"], row["pre_quant_val_bpb"]) == (12, one.before_export.bpb)
    assert row["eval_time_s"] == round(two.score.seconds + two.prepare_seconds, 1)
    assert given["compliance"]["score_first_ttt"] is True
    assert "TTT_ENABLED=True" in given["technique_summary"] and not checked(folder)["FAIL"]
    (joined,) = runs.read_group(str(folder))
    assert joined.score == two.score and joined.configuration["TTT_ENABLED"] == "True"
    # What is not its score
    with user_error("has no training: give the log of the run that made this artifact"):
        make([two], about)
    with user_error("score one artifact: give one of them"):
        make([one, two, two], about)
    other = re.sub("sha256:.*", f"sha256:{64 * '0'}", scored.read_text())
    written(folder, other, "eval_seed1.log")
    fault = "eval_seed1.log scores an artifact whose training has no log"
    assert fault in checked(folder)["FAIL"]
    other = "#1\nACCESS_TOKEN=12345678" + scored.read_text()
    path, found = written(folder, other, "eval_seed1.log"), checked(folder)["FAIL"]
    assert "eval_seed1.log does not begin with it" in found
    assert "eval_seed1.log contains what" in found
    with user_error("train_seed1.log and eval_seed1.log begin with different scripts"):
        make([runs.read_run(folder / "train_seed1.log"), runs.read_run(path)], about)


def test_an_evaluation_is_judged_as_its_training_is(swept):
    """Machine, script, settings and seconds of both count; one that did not finish has no score."""
    training = on_h100s(logs_of(swept)[0], changed=["EVAL_STRIDE", "NUM_LAYERS"])
    training.settings["EVAL_STRIDE"] = "999"  # of a score that does not count

    def joined(changes=None, **other) -> list[runs.Run]:
        changes, own = changes or {}, {"EVAL_ONLY": "x.npz", "EVAL_STRIDE": "64"}
        changed = {"settings": training.settings | own | changes, "changed": list(changes)}
        changed |= {"prepare_seconds": 30.0} | other
        return runs.with_evaluations([training, dataclasses.replace(training, **changed)])

    (good,) = joined()
    assert good.eval_seconds == good.score.seconds + 30
    claims = make_record.compliance([good], 1)
    assert claims["hardware_8xh100"] and claims["no_slot"] and claims["no_ngram_cache"]
    for claim, value, others in (
        ("hardware_8xh100", False, joined(ranks=4)),
        ("no_slot", None, joined(source=b"another")),
        ("no_ngram_cache", False, joined({"NGRAM_TILT": "True"})),
        ("eval_under_600s", False, joined(prepare_seconds=600.0)),
    ):
        assert make_record.compliance(others, 1)[claim] is value, claim
    assert "WORLD_SIZE of its score=8 and 2" in runs.differences([good, *joined(ranks=2)])
    (found,) = joined({"NGRAM_TILT": "True", "MATRIX_LR": "9.0"})
    assert found.changes == {"NUM_LAYERS": training.settings["NUM_LAYERS"], "NGRAM_TILT": "True"}
    assert [run.evaluation for run in joined(finished=False)] == [None, None]


def test_make_warns_and_quotes(made, data, tmp_path, monkeypatch, capsys):
    """Seeds that differ in their steps, paths of this machine, and a folder with a space."""
    monkeypatch.setattr(make_record, "ROOT", tmp_path / "two words")
    with pytest.raises(FileNotFoundError):  # the fixture looks elsewhere
        made(lambda t: re.sub(r"(?m)^step:1[12]/12 .*\n" * ("* SEED=2" in t), "", t))
    printed = capsys.readouterr()
    assert "warning: these runs have 10 to 12 steps" in printed.err
    assert f"note: the logs show paths of this machine: DATA_PATH={data}" in printed.err
    *_, tool, folder = shlex.split(printed.out)
    assert tool == str(tmp_path / "two words/tools/check_record.py")
    readme, submission = (
        Path(folder, name).read_text() for name in ("README.md", "submission.json")
    )
    assert str(data.parent) not in readme + submission and f"DATA_PATH={data.name}" in readme


def test_make_refuses(made, swept, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_code, "pack", lambda _: b"")  # packing takes seconds
    folder = made()
    with user_error("exists already"), monkeypatch.context() as patched:
        patched.setattr(make_record, "code_of", None)  # it is refused before that work
        made()
    assert folder.is_dir()
    first, second = logs_of(swept)
    text = second.read_text()
    died = text[: text.rindex("final_int6_sliding_window_exact")]
    given = dict.fromkeys(("author", "github_id", "name"), "x")
    for logs, part in {
        (first, first): "each log needs its own seed",
        (first, logs_of(swept, "0.005")[1]): "MATRIX_LR=0.025 and 0.005",
        (written(tmp_path, "#1\n" + first.read_text(), "1.txt"),): "the log was altered",
        (first, written(tmp_path, "#2\n" + text, "2.txt")): "begin with different scripts",
        (written(tmp_path, PUBLISHED),): "does not begin with the script",
        (first, written(tmp_path, died, "died.txt")): "did not finish",
    }.items():
        with user_error(part):
            make_record.make([runs.read_run(path) for path in logs], given, "t")


SAME = "submission.json says what the logs say: val_bpb"
BPB_AS_LOSS = "submission.json says what the logs say: val_loss is 1.1217, which is bits per byte"


@pytest.mark.parametrize(
    "log, given, status, part",
    [
        (PUBLISHED + LEGAL, {"val_bpb": 1.1192, "bytes_total": 15977386, "blurb": "x"}, "ok", SAME),
        (PUBLISHED, {"val_loss": 1.1217, "val_bpb": 1.1217}, "FAIL", BPB_AS_LOSS),
        (LATER, {"val_loss": 2.31944212, "val_bpb": 1.05989454, "seeds": [42]}, "ok", SAME),
    ],
)
def test_published_folders_get_sane_messages(tmp_path, log, given, status, part):
    """Fewer fields, no requirements.txt, another script, logs without source."""
    folder = tmp_path / "track_10min_16mb" / "2026-03-23_Someone"
    code = runs.read_run(written(folder, log)).code_bytes
    script = "import numpy as np\nfrom flash_attn_interface import flash_attn_func\n"
    written(folder, script + "#" * (code - len(script)), "train_gpt.py")
    written(folder, "# A published record\n" + "text " * 60, "README.md")
    about = {"author": "a", "github_id": "a", "name": "n", "date": "2026-03-23", **given}
    written(folder, json.dumps(about), "submission.json")
    found = checked(folder, starts=True)
    assert part in found[status]
    assert "is the script that the logs show: the logs do not begin with the script" in found["n/a"]
    assert "flash_attn_interface is not installed here" in found["n/a"]
    assert "train_gpt.py imports what requirements.txt lists" in found["ok"]
    # Fault B20: the published system overran its clock
    slow = "training takes at most 10 minutes: seed 42: 600.13 s"
    if log is LATER:
        assert not found["FAIL"] and "508.8 s" in found["ok"]
    else:
        assert slow in found["FAIL"]


RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/*/submission.json"))


def test_our_own_records_hold():
    found = {path: checked(path, starts=True)["FAIL"] for path in RECORDS}
    assert found and not any(found.values()), found


def test_the_probes_know_the_scripts_that_they_fit(monkeypatch):
    """Ours of today; our records have older ones. A good folder is probed above."""
    monkeypatch.setattr(check_record.legality, "suite", lambda *_: "")
    for path in RECORDS:
        folder = check_record.Folder(path)
        folder.runs[0].settings.update(TTT_ENABLED="True", TTT_MODE="lora")
        fits = b"def lora_update" in folder.source
        (probed,) = check_record.probes(folder)
        assert probed.status == ("ok" if fits else "n/a"), (path, probed)
        assert fits or "a later version of the script" in probed.detail
    folder.source = (ROOT / "train_gpt.py").read_bytes()
    del folder.runs[0].settings["FUSED_MLP"]  # a switch in those records
    (probed,) = check_record.probes(folder)
    assert probed.status == "ok", probed
