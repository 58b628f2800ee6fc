"""How the programs of tools/, data/ and bench/ start, answer --help, name mistakes and end."""

import argparse
import ast
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import program
import train_gpt
from conftest import ROOT, assert_mistake, run, start

FILES = [path for folder in ("tools", "data", "bench") for path in (ROOT / folder).glob("*.py")]
PROGRAMS = [path for path in sorted(FILES) if "__main__" in path.read_text()]
LAUNCHER = ROOT / "tools" / "launch.py"  # which needs no package
SCRIPTS = [ROOT / "train_gpt.py", *(path for path in PROGRAMS if path != LAUNCHER)]


def test_every_program_ends_in_one_way():
    """It is imported before other modules, so that Ctrl-C during their import is a sentence, too."""
    begin = r"(?s)(?:(?!\n *sys\.path).)*\n *sys\.path[^\n]*\n\n *import program\n.*"
    end = r"program\.run_program\([\w.]*\bmain\)\n"  # a program can be another name of one
    own = [path for path in PROGRAMS if not re.fullmatch(begin + end, path.read_text())]
    assert {path for path in FILES if path.parent.name == "tools"} <= set(PROGRAMS)
    assert own == [LAUNCHER], "it needs no package, so it cannot import train_gpt"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_answers_help(path, tmp_path):
    """Also with PYTHONSAFEPATH=1, which leaves its folder out of sys.path, as runpy does."""
    code = f"import runpy, sys; sys.argv = [{str(path)!r}, '--help']; "
    result = run(["-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')"], {}, tmp_path)
    assert result.stdout.startswith(f"usage: {path.name} ") and "--help" in result.stdout
    assert not result.stderr and not list(tmp_path.iterdir())


def test_a_rank_ends_without_its_threads(monkeypatch, capsys):
    """Those of failed collectives can abort an interpreter that ends."""
    output = io.BytesIO()

    def end(status):
        assert output.getvalue() == b"printed\n", "what was printed is lost"
        raise SystemExit(status + 10)

    def main():
        print("printed")
        train_gpt.require(False, "X=1 is wrong: unset it")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output))
    monkeypatch.setattr(train_gpt.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit, match="11"):
        program.run_program(main)
    assert capsys.readouterr().err == "error: X=1 is wrong: unset it\n"


FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
UNREAD = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
NO_SPACE = "error: cannot use standard output or a file: No space left on device; check the path"
PROGRAM = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); import program; "


@pytest.mark.parametrize("output, status, part", [(FULL, 1, NO_SPACE), (UNREAD, 141, "")])
@pytest.mark.parametrize("end", ["", "flush=True", "), sys.exit(3"])
def test_an_output_that_cannot_be_written(output, status, part, end):
    """As in `| head`. What was printed is written at the end, or at once, or by sys.exit."""
    code = f"{PROGRAM}{output}; program.run_program(lambda: (print('x', {end})))"
    result = run(["-c", code], {}, ROOT, status=status)
    assert result.stderr.startswith(part) and result.stderr.count("\n") == bool(part), result


def test_ctrl_c_between_the_modules():
    result = run(["-c", f"{PROGRAM}raise KeyboardInterrupt"], {}, ROOT, status=130)
    assert result.stderr == "error: interrupted by Ctrl-C\n"
    result = run(["-c", f"{PROGRAM}raise ValueError('x')"], {}, ROOT, status=1)
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("ValueError: x\n")


def test_ctrl_c_of_a_program_with_children_is_one_sentence(tmp_path):
    """A terminal sends it to all processes of the group. The workers wait for more."""
    code = f"""
import sys, time
sys.path[:0] = {[str(ROOT / name) for name in ("", "data")]}
import program, tokenize_text
def items():
    yield 1
    print("waits", file=sys.stderr, flush=True)
    time.sleep(60)
program.run_program(lambda: list(tokenize_text.in_workers(abs, items(), 2)))
"""
    process = start(["-c", code], {}, tmp_path, fresh=True, start_new_session=True)
    assert process.stderr.readline() == "waits\n"
    time.sleep(0.3)  # until the children of tokenize_text.py wait
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "error: interrupted by Ctrl-C\n")


MISTAKES = [  # (command, exit status, part of the sentence); argparse exits with 2
    ("tools/plot.py x.txt", 1, "cannot read x.txt"),
    ("tools/plot.py x.txt -o x.xyz", 2, "x.xyz has no known format: end it in one of ."),
    ("tools/plot.py x.txt -o no/x.png", 2, "no/x.png is in no folder: make no first"),
    ("tools/pack_code.py nothing.py", 1, "cannot read nothing.py"),
    ("tools/pack_code.py empty.py -o /dev/null/x", 2, "/dev/null/x is in no folder: make /dev/n"),
    ("tools/pack_code.py empty.py -o .", 2, ". is a folder: add the name of a file"),
    ("tools/pack_code.py bad.py", 1, "bad.py: comments cannot be removed"),
    ("tools/inspect_artifact.py nothing.xz", 1, "artifact nothing.xz cannot be used: No such fil"),
    ("tools/inspect_artifact.py bad.py", 1, "bad.py cannot"),
    ("tools/inspect_artifact.py step_5.npz", 1, "step_5.npz cannot be used: it is not an artifact"),
    ("tools/quantise.py . --text bad.py --bits 3 -o x.npz", 1, "cannot load .: ValueError"),
    ("tools/quantise.py . --text none.txt --bits 3 -o x.npz", 1, "error: cannot use none.txt: No"),
    ("tools/quantise.py . --text step_5.npz --bits 3 -o x.npz", 1, "cannot read step_5.npz: Uni"),
    ("tools/report.py --html x.html none.jsonl", 1, "cannot read none.txt"),
    ("tools/report.py --html logs/a.txt b.txt", 2, "logs/a.txt does not end in .html"),
    ("tools/report.py --html no/x.html b.txt", 2, "no/x.html is in no folder: make no first"),
    ("tools/report.py a.jsonl a.xz --prompt \udcff", 2, "--prompt: it is not UTF-8 (invalid start"),
    ("bench/step.py --trace no/x.json", 2, "no/x.json is in no folder: make no first"),
    ("tools/ablate.py --folder bad.py/a 'x: SEED=1'", 2, "bad.py is not a writable folder: choose"),
    ("tools/report.py a.jsonl", 2, "give logs/<RUN_ID>.jsonl and logs/<RUN_ID>.npz, or --html"),
    ("bench/step.py --against broken.py", 1, "cannot be imported"),
    ("bench/step.py --against none.py", 1, "is not a Python file"),
    ("bench/step.py --against empty.py", 1, "has no compile_blocks: give another version"),
    ("bench/step.py --rounds 0", 2, "is not a whole number above 0"),
    ("tools/ablate.py --steps 6 'x: MATRIX_LRR=1'", 1, "did you mean MATRIX_LR?"),
    ("tools/ablate.py --steps 6 'x: NOTHING=1'", 1, "is not a variant: write"),
    ("tools/ablate.py --steps 6 QK_GAIN_INIT=4", 1, "is not a variant: write"),
    ("tools/ablate.py --steps 6 'a: SEED=1' 'a: SEED=2'", 1, "two variants have one name"),
    ("tools/ablate.py --steps 6 'base: SEED=1'", 1, 'called "base"'),
    ("tools/ablate.py --steps 6 --jobs 0 'x: SEED=1'", 2, "--jobs: 0 is not a whole number above"),
    ("tools/ablate.py --steps 6 'x: SEED=1 @-1'", 1, "has the price '-1'"),
    ("tools/ablate.py --steps 6 --seeds 1 2 'x: SEED=1'", 2, "write the variants before --seeds"),
    ("tools/launch.py", 2, "an empty command cannot be run; give for example: python train_gpt.py"),
    ("tools/launch.py /nowhere/python", 2, "/nowhere/python cannot be run; give for example: py"),
    ("tools/make_record.py a --name x --author x --track 10mn_16mb", 2, "(choose from "),
    ("tools/compare.py a.txt", 2, "either the logs B or --record"),
    ("tools/compare.py a.txt a.txt --record 399", 2, "either the logs B or --record"),
]


@pytest.mark.parametrize("command, status, part", MISTAKES)
def test_a_mistake_is_named_and_leaves_no_file(command, status, part, tmp_path):
    texts = {"bad.py": "x = = 1\n", "broken.py": "import nothing_of_this_name", "empty.py": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    np.savez(tmp_path / "step_5.npz", metadata=np.zeros(1), weights=np.zeros(9))
    path, *words = shlex.split(command)
    assert_mistake([ROOT / path, *words], tmp_path, part, status, PYTHONDONTWRITEBYTECODE="1")
    assert {path.name for path in tmp_path.iterdir()} == {*texts, "step_5.npz"}


@pytest.mark.parametrize(
    "name, why",
    [
        (".", "is a folder: add the name of a file"),
        ("", "is a folder"),
        ("folder", "is a folder"),
        ("device", "is no regular file: choose another name"),  # root replaced /dev/null
        ("no/x", "is in no folder: make no first"),
        ("file/x", "is in no folder: make file first"),
        ("é" * 120, "is too long: choose a shorter name"),
        ("locked/x", "is in a folder that is not writable: choose another folder"),
        ("locked.txt", "is not writable: choose another name"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(name, why, tmp_path, monkeypatch):
    """Before the work. root may write to every folder, so permissions are imitated."""
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "locked"):
        (tmp_path / folder).mkdir()
    for file in ("file", "locked.txt"):
        (tmp_path / file).touch()
    os.mkfifo("device")
    monkeypatch.setattr(program.os, "access", lambda path, _: "locked" not in Path(path).name)
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(f'{name} {why}')}"):
        program.output_file(name)
    for fine in ("new", "file", "folder/new"):
        assert program.output_file(fine) == Path(fine)
    for fine in ("new/folder", "folder"):
        assert program.output_folder(fine) == Path(fine)
    for wrong in ("file", "file/x", "locked/x/y"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a writable folder: choose"):
            program.output_folder(wrong)


@pytest.mark.parametrize(
    "of_text, kind, right, wrong",
    [(program.positive, float, "2 .5 1e-9", ""), (program.count, int, "1 30", "0.5 ")],
)
def test_numbers_above_0(of_text, kind, right, wrong):
    for text in right.split():
        assert repr(of_text(text)) == repr(kind(text))
    for text in f"{wrong}0 -1 nan inf x ".split(" "):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not a (whole )?number"):
            of_text(text)


def test_closed_streams_lead_nowhere(tmp_path):
    """As by `<&- >&- 2>&-`. The next file that is opened would get such a number."""
    code = f"{PROGRAM}file = open('x', 'w'); program.run_program(lambda: (print('y'), "
    code += "sys.stderr.write('y'), print(repr(sys.stdin.read()), file.fileno() > 2, file=file)))"
    closed = {"preexec_fn": lambda: [os.close(number) for number in range(3)]}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, **closed)
    assert (tmp_path / "x").read_text() == "'' True\n" and result.returncode == 0


def test_what_standard_output_cannot_encode_is_escaped(capsys):
    """An accent where it is ASCII, and a name that is not UTF-8."""
    program.run_program(lambda: print("caf\xe9 \udcff"))
    assert capsys.readouterr().out == "caf\xe9 \\udcff\n"


def test_words_are_utf8_in_every_locale(monkeypatch):
    """With ASCII the two bytes of an accent arrive as two surrogates."""
    assert program.utf8("caf\udcc3\udca9") == program.utf8("caf\xe9") == "caf\xe9"


INSTALL = (
    "run `./run.sh setup`, then `source .venv/bin/activate` if there is a .venv; or "
    "`pip install -r requirements{}.txt`; on Windows use WSL2"
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_python_without_packages_is_one_sentence(path):
    """As after ./run.sh without `source .venv/bin/activate`. -S hides the packages."""
    result = subprocess.run([sys.executable, "-SE", path], capture_output=True, text=True)
    assert result.stderr == f"error: No module named 'numpy': {INSTALL.format('')}\n"
    assert result.returncode == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_waiting_openmp_threads_sleep(path, tmp_path):
    """On a busy machine spinning ones made a sample slow. OpenMP reads it with torch."""
    for name in ("numpy", "sentencepiece"):
        (tmp_path / f"{name}.py").touch()
    code = "import os, sys; sys.exit(f\"policy {os.environ.get('OMP_WAIT_POLICY')}\")"
    (tmp_path / "torch.py").write_text(code)
    given = {"OMP_WAIT_POLICY": "ACTIVE"} if path.name == "train_gpt.py" else {}
    options = {"env": {"PYTHONPATH": str(tmp_path), **given}, "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "-S", path, "--help"], **options)
    assert result.stderr == f"policy {'ACTIVE' if given else 'PASSIVE'}\n"


def test_an_older_python_is_one_sentence():
    """Python 3.8 can parse the file up to the end."""
    ast.parse((ROOT / "train_gpt.py").read_text(), feature_version=(3, 8))
    code = "import runpy, sys; sys.version_info = (3, 10, 12); sys.version = '3.10.12 (main)'; "
    code += f"runpy.run_path({str(ROOT / 'train_gpt.py')!r})"
    result = subprocess.run([sys.executable, "-SE", "-c", code], capture_output=True, text=True)
    expected = "error: this needs Python 3.11 or later, and this is 3.10.12\n"
    assert result.stderr == expected and result.returncode == 1


def test_what_is_older_than_the_training_is_freed_at_the_end(env, tmp_path):
    """Objects that the garbage collector ignored made thirty "nanobind: leaked" with Triton 3.9."""
    code = f"""
import os, runpy, sys, types
class Freed:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(1, b"freed\\n")
sys.modules["holder"] = types.ModuleType("holder")
sys.modules["holder"].object = Freed()
sys.argv = ["train_gpt.py"]
runpy.run_path({str(ROOT / "train_gpt.py")!r}, run_name="__main__")
"""
    result = run(["-c", code], env(ITERATIONS=1), tmp_path, fresh=True)
    assert result.stdout.endswith("train_gpt.py\nfreed\n"), result


NOT_THERE = "raise ModuleNotFoundError('No module named it')"
MISSING = f"No module named it: {INSTALL}"
FINDER = """import sys

class Finder:
    def find_spec(name, *_):
        if name == {module!r}:
            {content}

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    "command, module, content, status, sentence",
    [
        ("tools/plot.py --help", "matplotlib", NOT_THERE, 1, MISSING.format("-dev")),
        ("tools/report.py --html x.html x", "plotly", NOT_THERE, 1, MISSING.format("-dev")),
        ("train_gpt.py", "torch", NOT_THERE, 1, MISSING.format("")),
        ("train_gpt.py", "torch", "raise KeyboardInterrupt", 130, "interrupted by Ctrl-C"),
        ("train_gpt.py", "fcntl", NOT_THERE, 1, MISSING.format("")),  # Windows has none
        ("tools/compare.py", "fcntl", NOT_THERE, 1, MISSING.format("")),
    ],
)
def test_a_failed_import_is_one_sentence(command, module, content, status, sentence, tmp_path):
    """A package is missing, or Ctrl-C comes while it is imported. A file could not hide fcntl, which
    is built into Debian's Python."""
    (tmp_path / "sitecustomize.py").write_text(FINDER.format(module=module, content=content))
    command, path = [ROOT / command.split()[0], *command.split()[1:]], {"PYTHONPATH": str(tmp_path)}
    result = run(command, path, tmp_path, fresh=True, status=status)
    assert result.stderr == f"error: {sentence}\n"
