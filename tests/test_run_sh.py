"""run.sh on imitated machines: which Python it takes, what it installs and what it starts."""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from check_record import modules
from conftest import ROOT

# A Python that sees only the modules in the folder site/ beside its bin/, and in the one that the file `system` names.
# Its pip has what the file `satisfied` lists, or fails to install if the file `offline` exists. Every installation is
# noted.
PYTHON = """#!/usr/bin/env bash
set -e
root=$(dirname "$(dirname "${BASH_SOURCE[0]}")")
case "${1:-} ${2:-}" in
"-m ensurepip")
    echo "$root ensurepip" >>"$INSTALLED"
    rm "$root/no-pip" ;;
"-m pip")
    if [ -e "$root/no-pip" ]; then echo "No module named pip" >&2; exit 1; fi
    if [ "$3" = --version ]; then exit; fi
    case "$*" in *"--isolated --no-index"*) exec grep -qsx -e "$6" -e "$7" "$root/satisfied" ;; esac
    echo "$root ${*:4}" >>"$INSTALLED"
    if [ -e "$root/offline" ]; then echo "ERROR: no network" >&2; exit 1; fi
    echo "$7" >>"$root/satisfied"
    cp -rn "$TORCH" "$root/site/" ;;
"-m venv")
    echo "venv ${*:3}" >>"$INSTALLED"
    mkdir -p .venv/bin .venv/site && cp "${BASH_SOURCE[0]}" .venv/bin/python
    cp "$root/offline" .venv 2>/dev/null || true
    echo "$root/site" >.venv/system ;;
*)
    export PYTHONPATH="$root/site:$PWD:$(cat "$root/system" 2>/dev/null || true)"
    before="import sys; sys.prefix = sys.base_prefix"
    if [ -e "$root/pyvenv.cfg" ]; then before="import sys; sys.prefix = '.venv'"; fi
    if [ -e "$root/old" ]; then
        if [ "$1" = --version ]; then echo Python 3.10.12; exit; fi
        before="$before; sys.version_info = (3, 10, 12)"
    fi
    if [ "$1" = -c ]; then set -- -c "$before; $2"; fi
    exec %s -S "$@" ;;
esac
"""
# device_count() counts what the driver has; is_available() says whether this build can use it.
TORCH = """
import os
__version__ = "{version}"
class version:
    cuda = {cuda!r}
class cuda:
    is_available = lambda: os.environ.get("USABLE") == "1"
    device_count = lambda: int(os.environ.get("GPUS", 0))
"""
LAUNCHER = "import os, sys\nprint('launched', sys.argv[1:], 'frac', os.getenv('WARMDOWN_FRAC'))"
OWN = "NPROC SEEDS GRID SCRIPT"  # of run.sh, not knobs
CHECK = """import os
names = "RANK WORLD_SIZE OMP_NUM_THREADS WARMDOWN_FRAC DATA_PATH RUN_SH".split()
print("checked", *map(os.environ.get, names))"""
SETTINGS = "NUM_LAYERS=2 RUN_ID=demo DATA_PATH=demo_data TOKENIZER_PATH=demo_data/tokenizer.model"


class Machine:
    """A copy of run.sh beside an imitated python3 and nvidia-smi; programs that only print."""

    def __init__(self, folder):
        self.repository, self.root = folder / "repository", folder / "machine"
        self.installed, self.fresh = folder / "installed", folder / "fresh"
        for name in ("run.sh", "tools/launch.py"):
            self.write(name, (ROOT / name).read_text())
        for name in ("data/demo_corpus.py", "tools/report.py", "train_gpt.py"):
            self.write(name, f"print('ran', {name!r})")
        self.write("program.py", "cores = lambda: 1")
        self.write("tools/check_machine.py", CHECK)
        self.write("tools/demo_settings.py", f"print(*{SETTINGS.split()}, sep='\\n')")
        self.write(self.installed, "")
        self.python(self.root, "python3")
        self.nvidia_smi("No devices were found")
        self.torch(self.fresh, "2.13.0")

    def write(self, name, text):
        """A program or file of the repository, or at a whole path."""
        path = self.repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def python(self, root, name="python"):
        self.write(root / "bin" / name, PYTHON % sys.executable)
        (root / "site").mkdir()

    def torch(self, root, version="2.9.1+cu128", cuda="12.8"):
        self.write(root / "site/torch/__init__.py", TORCH.format(version=version, cuda=cuda))
        self.write(root / "site/torch/distributed/run.py", LAUNCHER)

    def nvidia_smi(self, text, status=0):
        code = f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{text}'\nexit {status}\n"
        self.write(self.root / "bin" / "nvidia-smi", code)

    def how(self, cwd=None, **environment):
        """The options of a process in this machine."""
        found = {"PATH": f"{self.root / 'bin'}:{os.defpath}", "INSTALLED": str(self.installed)}
        found["TORCH"] = str(self.fresh / "site" / "torch")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return {"env": {**found, **environment}, "cwd": cwd or self.repository, **pipes}

    def run(self, *arguments, **environment):
        return subprocess.run([self.repository / "run.sh", *arguments], **self.how(**environment))

    def ran(self, **environment):
        """(what was printed, the lines that say how to go on)."""
        result = self.run(**environment)
        assert result.returncode == 0, result.stderr
        printed, _, end = result.stdout.partition("\nnext:\n")
        return printed, end.splitlines()

    def trains(self, **environment):
        """The programs of the demonstration run, in this order."""
        assert self.ran(**environment)[0] == TRAINING

    def installations(self):
        """Since the last call."""
        text = self.installed.read_text()
        self.installed.write_text("")
        return text.replace(f"{self.root} ", "machine ").splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def complete(machine):
    """A machine where nothing is missing, with data for the record run."""
    machine.torch(machine.root)
    machine.write(machine.root / "satisfied", "requirements.txt\nrequirements-dev.txt\n")
    machine.write("data/datasets/fineweb10B_sp1024/fineweb_train_000000.bin", "")
    return machine


TRAINING = "ran data/demo_corpus.py\nran train_gpt.py\nran tools/report.py\n"
INSTALL = "--quiet --disable-pip-version-check -r requirements.txt"
ACTIVATE = "    source .venv/bin/activate"
EVALUATE = "    EVAL_ONLY=logs/demo.npz {} train_gpt.py"


def test_a_complete_python_is_taken(complete):
    printed, end = complete.ran()
    assert printed == TRAINING and EVALUATE.format("python3") in end and ACTIVATE not in end
    assert complete.run("setup").stdout == "python3\n" and complete.installations() == []


@pytest.mark.parametrize("version", ["", "2.8.0", "2.9.1+cu128", "2.10.0a0+git123"])
def test_what_is_missing_goes_into_a_venv_that_inherits_a_torch(machine, version):
    """The pins are for a machine without torch: they could replace what belongs to one that is there.
    PYTHONOPTIMIZE removes assertions."""
    if version:
        machine.torch(machine.root, version)
    machine.trains(PYTHONOPTIMIZE="1")
    pins = " --constraint constraints.txt" * (version in ("", "2.8.0"))
    first = ["venv --system-site-packages .venv", f".venv {INSTALL}{pins}"]
    assert machine.installations() == first
    machine.trains()  # the next run takes .venv at once
    assert machine.installations() == []
    assert machine.run("setup").stdout == ".venv/bin/python\n"
    (command,) = machine.installations()
    assert "-r requirements-dev.txt" in command


def test_a_failed_installation_is_one_sentence(machine):
    (machine.root / "offline").touch()
    failed = machine.run()
    sentence = "error: could not install requirements.txt into .venv/bin/python: see"
    assert failed.stderr.splitlines()[-1].startswith(sentence) and failed.returncode == 1


def test_a_virtual_environment_without_pip_gets_it(machine):
    """As uv makes them. A .venv could not inherit their torch."""
    machine.torch(machine.root)
    for name in ("pyvenv.cfg", "no-pip"):
        (machine.root / name).touch()
    machine.trains()
    assert machine.installations() == ["machine ensurepip", f"machine {INSTALL}"]


def test_an_older_python_is_an_error(complete):
    """Before pip, which would say ResolutionImpossible. It is not taken even if it has torch."""
    (complete.root / "old").touch()
    result = complete.run()
    assert result.returncode == 1 and complete.installations() == []
    expected = "error: Python 3.11 or later is needed, and there is Python 3.10.12: install one\n"
    assert result.stderr == expected
    complete.python(complete.repository / ".venv")
    complete.torch(complete.repository / ".venv")
    complete.trains()
    assert complete.installations() == [f".venv {INSTALL}"]


CLEANS_UP = """
import sys, time
try:
    print("waits", file=sys.stderr, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("error: interrupted by Ctrl-C", file=sys.stderr)
    sys.exit(130)
"""


@pytest.mark.parametrize("name", ["data/demo_corpus", "tools/demo_settings", "tools/report"])
def test_ctrl_c_is_one_sentence(complete, name):
    """As in a terminal, all processes of the group get SIGINT. The program says it, after it has
    ended its workers and removed what it has begun."""
    complete.write(f"{name}.py", CLEANS_UP)
    options = {**complete.how(), "start_new_session": True}
    process = subprocess.Popen([complete.repository / "run.sh"], **options)
    assert process.stderr.readline() == "waits\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "error: interrupted by Ctrl-C\n"
    assert process.returncode in (130, -signal.SIGINT)  # which a shell shows as 130


def test_a_failure_before_the_training_ends_the_demonstration(complete):
    for name in ("data/demo_corpus.py", "tools/demo_settings.py"):
        complete.write(name, f"import sys; sys.exit('error: {name}')")
        result = complete.run()
        assert (result.returncode, result.stdout, result.stderr) == (1, "", f"error: {name}\n")


@pytest.mark.parametrize("gpus, build, cuda", [(0, "2.9.1+cpu", None), (8, "2.9.1+cu128", "12.8")])
def test_gpus_that_torch_cannot_use_are_an_error(complete, gpus, build, cuda):
    """Not a demonstration. With a driver that is too old, torch still counts the GPUs."""
    complete.torch(complete.root, build, cuda)
    complete.nvidia_smi("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1f)")
    result = complete.run(GPUS=str(gpus), USABLE="0")
    assert result.returncode == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"GPUs, but torch {build} (CUDA {cuda}) of python3 sees none: install" in line
    complete.trains(GPUS=str(gpus), USABLE="0", DEVICE="cpu")
    hidden = complete.run(USABLE="0", CUDA_VISIBLE_DEVICES="9").stderr
    assert " sees none (CUDA_VISIBLE_DEVICES=9): " in hidden
    complete.nvidia_smi("NVIDIA-SMI has failed because GPU 0", 9)
    assert complete.run().stderr == ""


@pytest.mark.parametrize(
    "gpus, environment, nproc, fraction",
    [
        (8, {}, 8, None),
        (4, {}, 4, "0.41"),
        (8, {"NPROC": "4", "WARMDOWN_FRAC": "0.5"}, 4, "0.5"),
        (4, {"WARMDOWN_ITERS": "100"}, 4, None),
        (16, {"NPROC": "8"}, 8, None),
        (4, {"GRID": "SEED=1\nWARMDOWN_ITERS=9,10"}, 4, None),
        (4, {"GRID": "MY_WARMDOWN_ITERS=1"}, 4, "0.41"),
    ],
)
def test_the_warmdown_follows_the_number_of_processes(complete, gpus, environment, nproc, fraction):
    """One in steps wins, also that of a grid."""
    complete.write("tools/sweep.py", LAUNCHER)
    printed, _ = complete.ran(GPUS=str(gpus), USABLE="1", **environment)
    words = f"'--standalone', '--local-addr=127.0.0.1', '--nproc_per_node={nproc}', 'train_gpt.py'"
    assert printed.count("\n") == 1 and printed.endswith(f"{words}] frac {fraction}\n")


def test_a_sweep_starts_its_runs_with_the_launcher(complete):
    complete.write("tools/sweep.py", LAUNCHER)
    printed, end = complete.ran(SEEDS="1 2")
    words = "['--', 'python3', 'tools/launch.py', 'python3', 'train_gpt.py']"
    assert f"launched {words}" in printed and "report" not in printed
    # which installs scipy, too
    compare = "    $(./run.sh setup) tools/compare.py launched ['--patterns']"
    assert end[0].startswith(compare)


def test_a_packed_script_runs_in_place_of_the_plain_one(complete):
    """In a run, a sweep and on GPUs, if it is of today's train_gpt.py; the check asks, too."""
    complete.write("packed.py", "print('ran packed.py')")
    complete.write("tools/sweep.py", LAUNCHER)
    complete.write("tools/pack_code.py", "import sys; print('ran', sys.argv[1:])")
    verified, gpus = "ran ['--check', 'packed.py']\n", {"GPUS": "8", "USABLE": "1"}
    printed, (_, score, seeds) = complete.ran(SCRIPT="packed.py")
    assert printed == verified + TRAINING.replace("train_gpt", "packed")
    assert score.endswith(" python3 packed.py") and seeds.startswith("    SCRIPT=packed.py SEEDS=")
    for more in (gpus, {"SEEDS": "1 2"}, {"SEEDS": "1 2", **gpus}):
        found = complete.run(SCRIPT="packed.py", **more).stdout
        assert found.startswith(verified) and "'packed.py'] frac" in found
        assert "train_gpt.py" not in found
    complete.write("tools/pack_code.py", "import sys; sys.exit('error: old')")
    for words in ([], ["check"]):
        refused = complete.run(*words, SCRIPT="packed.py", **gpus)
        assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", "error: old\n")


def test_the_check_has_the_settings_of_the_run(complete, tmp_path):
    """On GPUs those of the record run, else the demonstration's. As with torchrun, a rank has one
    thread."""
    on_cpu = complete.run("check", NPROC="1", OMP_NUM_THREADS="2")
    assert on_cpu.stdout == f"ran data/demo_corpus.py\nchecked 0 1 2 None demo_data {OWN}\n"
    complete.write(tmp_path / "shards" / "fineweb_train_000000.bin", "")
    gpus = {"GPUS": "2", "USABLE": "1", "DATA_PATH": str(tmp_path / "shards")}
    on_gpus = complete.run("check", **gpus)
    ranks = [f"checked {rank} 2 1 0.41 {tmp_path}/shards {OWN}" for rank in range(2)]
    assert sorted(on_gpus.stdout.splitlines()) == ranks and on_gpus.returncode == 0
    complete.write("tools/check_machine.py", "import sys; sys.exit(1)")
    assert complete.run("check", **gpus).returncode == 1
    no_data = complete.run("check", **gpus | {"DATA_PATH": "nowhere"})
    assert no_data.returncode == 1 and "has no fineweb_train_NNNNNN.bin" in no_data.stderr


def test_the_tests_get_one_process_more_than_the_cores(complete):
    complete.write(complete.root / "site/pytest/__main__.py", "import sys; print(sys.argv[1:])")
    result = complete.run("test", "-x")
    words = "'-q', '-n', '2', '--maxprocesses', '8', '--dist', 'worksteal', '-x'"
    assert result.stdout == f"[{words}]\n", result.stderr


def test_the_demonstration_has_the_settings_of_its_tool(complete):
    """Values may have spaces. As many ranks as NPROC says are started."""
    complete.write("tools/demo_settings.py", "print('DATA_PATH=a b\\nNPROC=2\\nRUN_ID=demo')")
    complete.write("train_gpt.py", CHECK)
    printed, _ = complete.ran(OMP_NUM_THREADS="1")
    ranks = sorted(line for line in printed.splitlines() if line.startswith("checked"))
    assert ranks == [f"checked {rank} 2 1 None a b {OWN}" for rank in range(2)]


def test_the_end_says_how_to_activate_the_venv(machine):
    """Unless it is active."""
    machine.python(venv := machine.repository / ".venv")
    machine.torch(venv)
    _, (first, *others) = machine.ran()
    assert first == ACTIVATE and EVALUATE.format("python") in others
    _, active = machine.ran(VIRTUAL_ENV=str(venv))
    assert active == others


def test_the_end_names_the_data_that_were_given(complete, tmp_path):
    """Also for a sweep; quoted, and right if run.sh was started in another folder."""
    (tmp_path / "here").mkdir()
    given = {"DATA_PATH": "my data", "cwd": tmp_path / "here"}
    gpus = {"GPUS": "8", "USABLE": "1"}
    data = str(tmp_path / "here" / "my data").replace(" ", "\\ ")
    _, end = complete.ran(**given)
    assert end[0] == f"    cd {complete.repository}"
    assert end[-1] == f"    DATA_PATH={data} SEEDS='1337 42 2025' ./run.sh"
    command = f"run: cd {complete.repository} && python3 data/download_fineweb.py\n"
    assert complete.run(**gpus, **given).stderr.endswith(command)
    other = complete.run(**gpus, DATA_PATH="data/fineweb10B_sp8192_caseops")
    assert other.stderr.endswith("data/download_fineweb.py --variant sp8192_caseops\n")
    _, (sample, evaluate, _) = complete.ran(**gpus, RUN_ID="own text")
    assert "logs/own text.npz" in shlex.split(sample)
    assert "EVAL_ONLY=logs/own text.npz" in shlex.split(evaluate)


def test_the_end_repeats_the_users_settings_and_the_prompt(complete):
    """They are those that run.sh names. Text that is not Python begins with "The ", and no text of the
    demonstration is made beside it."""
    complete.write("tools/report.py", "import sys; print(sys.argv[1:])")
    given = {"MAX_WALLCLOCK_SECONDS": "30", "DEVICE": "cpu", "VOCAB_SIZE": "9", "NPROC": "1"}
    made, (sample, _, seeds) = complete.ran(**given)
    settings = dict(word.split("=") for word in shlex.split(seeds)[:-1])
    assert settings == given | {"SEEDS": "1337 42 2025"}
    assert shlex.split(sample)[-1] == "def __init__(self,"
    assert "demo_corpus" in made and "'--prompt', 'def __init__(self,'" in made
    own, (sample, *_) = complete.ran(DATA_PATH="mine")
    assert shlex.split(sample)[-1] == "The "
    assert "demo_corpus" not in own and "'--prompt', ''" in own
    # The artifact has the score's knobs. Each rank hands on what its own documents taught.
    _, (_, evaluate, _) = complete.ran(NGRAM_TILT="1", NPROC="2")
    setting, _, _, launcher, _, _, *last = shlex.split(evaluate)
    assert (setting, launcher) == ("EVAL_ONLY=logs/demo.npz", "torch.distributed.run")
    assert last == ["--nproc_per_node=2", "train_gpt.py"]


def test_it_runs_beside_its_file_when_a_link_starts_it(complete, tmp_path):
    """A link to a link, found in PATH. CDPATH is the user's."""
    places = tmp_path / "bin", tmp_path / "here"
    for place in places:
        place.mkdir()
    (places[0] / "file").symlink_to(complete.repository / "run.sh")
    (places[0] / "golf").symlink_to("file")
    options = complete.how(cwd=places[1], CDPATH=str(tmp_path))
    options["env"]["PATH"] = f"{places[0]}:{options['env']['PATH']}"
    result = subprocess.run(["golf"], **options)
    expected = f"{TRAINING}\nnext:\n    cd {complete.repository}\n"
    assert result.stdout.startswith(expected), result.stderr
    assert not list(places[1].iterdir()) and len(list(places[0].iterdir())) == 2


def requirements(*names):
    """What these files ask of each package, without markers."""
    text = "".join((ROOT / name).read_text() for name in names)
    return dict(re.findall(r"(?m)^(\w[\w-]*)([^\s;]*)", text))


def test_requirements_are_ranges_of_what_is_imported():
    """A range of torch keeps a pod's; the constraints are the versions that the tests run with. The
    README and the image install all."""
    imported = modules(ast.walk(ast.parse((ROOT / "train_gpt.py").read_text())))
    imported -= sys.stdlib_module_names | {"triton", "flash_attn_interface", "kernels"}
    assert imported == requirements("requirements.txt").keys()
    for name, part in (
        ("requirements-dev.txt", "\n-r requirements.txt\n"),
        ("README.md", "\npip install -r requirements-dev.txt"),
        ("Dockerfile", "COPY requirements.txt requirements-dev.txt /opt/golf/\n"),
        ("Dockerfile", "-r /opt/golf/requirements-dev.txt"),
    ):
        assert part in (ROOT / name).read_text(), name
    wanted = requirements("requirements.txt", "requirements-dev.txt")
    versions = requirements("constraints.txt")
    assert wanted.keys() == versions.keys()
    for package, asked in wanted.items():
        assert "==" not in asked or package == "ruff"
        assert versions[package].removeprefix("==") in SpecifierSet(asked), package
    torch = SpecifierSet(wanted["torch"])
    assert "2.9.1+cu128" in torch and "2.15.0" in torch
    assert "2.8.0" not in torch and "2.16.0" not in torch


@pytest.mark.parametrize("word, end", [("--help", ""), ("tset", "run.sh has no command tset\n")])
def test_run_sh_usage(word, end, tmp_path):
    result = subprocess.run([ROOT / "run.sh", word], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == bool(end) and "./run.sh test" in result.stdout + result.stderr
    assert result.stderr.endswith(end)
