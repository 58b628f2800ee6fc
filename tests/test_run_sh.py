"""run.sh on imitated machines: which Python it takes, what it installs and what it starts."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

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
    if [ -e "$root/old" ]; then
        if [ "$1" = --version ]; then echo Python 3.10.12; exit; fi
        if [ "$1" = -c ]; then set -- -c "import sys; sys.version_info = (3, 10, 12); $2"; fi
    fi
    if [ "$1" = -c ] && [ ! -e "$root/pyvenv.cfg" ]; then set -- -c "import sys; sys.prefix = sys.base_prefix; $2"; fi
    if [ "$1" = -c ] && [ -e "$root/pyvenv.cfg" ]; then set -- -c "import sys; sys.prefix = '.venv'; $2"; fi
    exec %(python)s -S "$@" ;;
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
SETTINGS = "NUM_LAYERS=2 RUN_ID=demo DATA_PATH=demo_data TOKENIZER_PATH=demo_data/tokenizer.model"


class Machine:
    """A copy of run.sh beside an imitated python3 and nvidia-smi; programs that only print."""

    def __init__(self, folder):
        self.repository, self.root = folder / "repository", folder / "machine"
        self.installed = folder / "installed"
        (self.repository / "tools").mkdir(parents=True)
        (self.repository / "data").mkdir()
        for name in ("run.sh", "tools/launch.py"):
            shutil.copy(ROOT / name, self.repository / name)
        for name in ("data/demo_corpus.py", "tools/report.py"):
            (self.repository / name).write_text(f"print('ran', {name!r})")
        (self.repository / "train_gpt.py").write_text("print('ran train_gpt.py')")
        (self.repository / "program.py").write_text("cores = lambda: 1")
        check_machine = "import os\nprint('checked', os.environ['RANK'], *map(os.environ.get, %s))"
        names = ("WORLD_SIZE", "OMP_NUM_THREADS", "WARMDOWN_FRAC", "DATA_PATH", "RUN_SH")
        (self.repository / "tools" / "check_machine.py").write_text(check_machine % (names,))
        settings = "\n".join(SETTINGS.split())
        (self.repository / "tools" / "demo_settings.py").write_text(f"print({settings!r})")
        self.python(self.root / "bin" / "python3")
        self.nvidia_smi("No devices were found")
        self.torch(folder / "fresh", "2.13.0")

    def python(self, path):
        path.parent.mkdir(parents=True)
        (path.parent.parent / "site").mkdir()
        path.write_text(PYTHON % {"python": sys.executable})
        path.chmod(0o755)

    def torch(self, site, version="2.9.1+cu128", cuda="12.8"):
        (site / "torch" / "distributed").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text(TORCH.format(version=version, cuda=cuda))
        (site / "torch" / "distributed" / "run.py").write_text(LAUNCHER)

    def nvidia_smi(self, text, status=0):
        path = self.root / "bin" / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{text}'\nexit {status}\n")
        path.chmod(0o755)

    def how(self, cwd=None, **environment):
        """The options of a process in this machine."""
        found = {"PATH": f"{self.root / 'bin'}:{os.defpath}", "INSTALLED": str(self.installed)}
        found["TORCH"] = str(self.root.parent / "fresh" / "torch")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return {"env": {**found, **environment}, "cwd": cwd or self.repository, **pipes}

    def run(self, *arguments, **environment):
        return subprocess.run([self.repository / "run.sh", *arguments], **self.how(**environment))

    def trains(self, **environment):
        """The programs of the demonstration run, in this order."""
        result = self.run(**environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.partition("\nnext:\n")[0] == TRAINING
        return result

    def complete(self):
        """Nothing is missing."""
        self.torch(self.root / "site")
        (self.root / "satisfied").write_text("requirements.txt\nrequirements-dev.txt\n")

    def installations(self):
        text = self.installed.read_text() if self.installed.exists() else ""
        return text.replace(f"{self.root} ", "machine ").splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def requirements(name):
    """The requirements of a file, by the name of the package."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        words = line.partition("#")[0].partition(";")[0].split()  # without a marker
        if words[:1] == ["-r"]:
            found |= requirements(words[1])
        else:
            found |= {re.match(r"[\w-]+", word)[0]: word for word in words}
    return found


OPTIONAL = {"triton", "flash_attn_interface", "kernels"}
TRAINING = "ran data/demo_corpus.py\nran train_gpt.py\nran tools/report.py\n"
INSTALL = "--quiet --disable-pip-version-check -r requirements.txt"


def test_a_complete_python_is_taken(machine):
    machine.complete()
    machine.trains()
    assert machine.run("setup").stdout == "python3\n" and machine.installations() == []


@pytest.mark.parametrize("version", ["", "2.8.0", "2.9.1+cu128", "2.10.0a0+git123"])
def test_what_is_missing_goes_into_a_venv_that_inherits_a_torch(machine, version):
    """The pins are for a machine without torch: they could replace what belongs to one that is there.
    PYTHONOPTIMIZE removes assertions."""
    if version:
        machine.torch(machine.root / "site", version)
    machine.trains(PYTHONOPTIMIZE="1")
    pins = " --constraint constraints.txt" * (version in ("", "2.8.0"))
    assert machine.installations() == [
        "venv --system-site-packages .venv",
        f".venv {INSTALL}{pins}",
    ]
    machine.installed.unlink()
    machine.trains()  # the next run takes .venv at once
    assert machine.installations() == []
    assert machine.run("setup").stdout == ".venv/bin/python\n"
    (command,) = machine.installations()
    assert "-r requirements-dev.txt" in command


def test_a_failed_installation_is_one_sentence(machine):
    (machine.root / "offline").touch()
    failed = machine.run()
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("error: could not install requirements.txt into .venv/bin/python: see")


def test_a_virtual_environment_without_pip_gets_it(machine):
    """As uv makes them. A .venv could not inherit their torch."""
    machine.torch(machine.root / "site")
    (machine.root / "pyvenv.cfg").touch()
    (machine.root / "no-pip").touch()
    machine.trains()
    assert machine.installations() == ["machine ensurepip", f"machine {INSTALL}"]


def test_an_older_python_is_an_error(machine):
    """Before pip, which would say ResolutionImpossible. It is not taken even if it has torch."""
    (machine.root / "old").touch()
    machine.complete()
    result = machine.run()
    assert result.returncode == 1 and machine.installations() == []
    expected = "error: Python 3.11 or later is needed, and there is Python 3.10.12: install one\n"
    assert result.stderr == expected
    machine.python(machine.repository / ".venv" / "bin" / "python")
    machine.torch(machine.repository / ".venv" / "site")
    machine.trains()  # by .venv
    assert machine.installations() == [f".venv {INSTALL}"]


@pytest.mark.parametrize(
    "name", ["data/demo_corpus.py", "tools/demo_settings.py", "tools/report.py"]
)
def test_ctrl_c_is_one_sentence(machine, name):
    """As in a terminal, all processes of the group get SIGINT. The program says it, after it has
    ended its workers and removed what it has begun."""
    machine.complete()
    code = """
import os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("cleaned").touch()
    os.write(2, b"error: interrupted by Ctrl-C\\n")
    sys.exit(130)
signal.signal(signal.SIGINT, end)
print("waits", file=sys.stderr, flush=True)
time.sleep(60)
"""
    (machine.repository / name).write_text(code)
    # A shell's background ignores Ctrl-C, and its children would.
    default = lambda: os.setsid() or signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    command = [machine.repository / "run.sh"]
    process = subprocess.Popen(command, preexec_fn=default, **machine.how())
    assert process.stderr.readline() == "waits\n"
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert error == "error: interrupted by Ctrl-C\n"
    assert process.returncode in (130, -signal.SIGINT)  # which a shell shows as 130
    assert (machine.repository / "cleaned").exists()


@pytest.fixture
def complete(machine):
    """A machine where nothing is missing, with data for the record run."""
    machine.complete()
    data = machine.repository / "data" / "datasets" / "fineweb10B_sp1024"
    data.mkdir(parents=True)
    (data / "fineweb_train_000000.bin").touch()
    return machine


@pytest.mark.parametrize("name", ["data/demo_corpus.py", "tools/demo_settings.py"])
def test_a_failure_before_the_training_ends_the_demonstration(complete, name):
    (complete.repository / name).write_text("import sys; sys.exit('error: no text')")
    result = complete.run()
    assert result.returncode == 1 and result.stderr == "error: no text\n"
    assert "train_gpt" not in result.stdout


LISTED = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1f)"


@pytest.mark.parametrize("gpus, build, cuda", [(0, "2.9.1+cpu", None), (8, "2.9.1+cu128", "12.8")])
def test_gpus_that_torch_cannot_use_are_an_error(complete, gpus, build, cuda):
    """Not a demonstration. With a driver that is too old, torch still counts the GPUs."""
    shutil.rmtree(complete.root / "site" / "torch")
    complete.torch(complete.root / "site", build, cuda)
    complete.nvidia_smi(LISTED)
    result = complete.run(GPUS=str(gpus), USABLE="0")
    assert result.returncode == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"GPUs, but torch {build} (CUDA {cuda}) of python3 sees none: install" in line
    complete.trains(GPUS=str(gpus), USABLE="0", DEVICE="cpu")
    hidden = complete.run(USABLE="0", CUDA_VISIBLE_DEVICES="9").stderr
    assert " sees none (CUDA_VISIBLE_DEVICES=9): " in hidden
    complete.nvidia_smi("NVIDIA-SMI has failed because GPU 0", 9)
    assert complete.trains().stderr == ""


@pytest.mark.parametrize(
    "gpus, environment, nproc, fraction",
    [
        (8, {}, 8, None),
        (4, {}, 4, "0.41"),
        (8, {"NPROC": "4", "WARMDOWN_FRAC": "0.5"}, 4, "0.5"),
        (4, {"WARMDOWN_ITERS": "100"}, 4, None),
        (16, {"NPROC": "8"}, 8, None),
    ],
)
def test_the_warmdown_follows_the_number_of_processes(complete, gpus, environment, nproc, fraction):
    result = complete.run(GPUS=str(gpus), USABLE="1", **environment)
    launched = result.stdout.partition("\nnext:\n")[0]
    words = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={nproc}", "train_gpt.py"]
    assert launched == f"launched {words} frac {fraction}\n"


def test_a_sweep_starts_its_runs_with_the_launcher(complete):
    """A warmdown in steps of its grid wins."""
    (complete.repository / "tools" / "sweep.py").write_text(LAUNCHER)
    result = complete.run(SEEDS="1 2")
    words = "['--', 'python3', 'tools/launch.py', 'python3', 'train_gpt.py']"
    assert f"launched {words}" in result.stdout
    assert "report" not in result.stdout and result.returncode == 0
    # which installs scipy, too
    compare = "    $(./run.sh setup) tools/compare.py launched ['--patterns']"
    assert f"\nnext:\n{compare}" in result.stdout
    for grid, fraction in (("SEED=1\nWARMDOWN_ITERS=9,10", None), ("MY_WARMDOWN_ITERS=1", 0.41)):
        first, *_ = complete.run(GPUS="4", USABLE="1", GRID=grid).stdout.splitlines()
        assert first.endswith(f"frac {fraction}")


def test_a_packed_script_runs_in_place_of_the_plain_one(complete):
    """In a run, a sweep and on GPUs, if it is of today's train_gpt.py; the check asks, too."""
    (complete.repository / "packed.py").write_text("print('ran packed.py')")
    (complete.repository / "tools" / "sweep.py").write_text(LAUNCHER)
    packer = complete.repository / "tools" / "pack_code.py"
    packer.write_text("import sys; print('ran', sys.argv[1:])")
    verified, gpus = "ran ['--check', 'packed.py']\n", {"GPUS": "8", "USABLE": "1"}
    found = complete.run(SCRIPT="packed.py").stdout
    assert found.startswith(verified) and TRAINING.replace("train_gpt", "packed") in found
    score, seeds = found.splitlines()[-2:]
    assert score.endswith(" python3 packed.py") and seeds.startswith("    SCRIPT=packed.py SEEDS=")
    for more in (gpus, {"SEEDS": "1 2"}, {"SEEDS": "1 2", **gpus}):
        found = complete.run(SCRIPT="packed.py", **more).stdout
        assert found.startswith(verified) and "'packed.py'] frac" in found
        assert "train_gpt.py" not in found
    packer.write_text("import sys; sys.exit('error: old')")
    for words in ([], ["check"]):
        refused = complete.run(*words, SCRIPT="packed.py", **gpus)
        assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", "error: old\n")


def test_the_check_has_the_settings_of_the_run(complete):
    """On GPUs those of the record run, else the demonstration's. As with torchrun, a rank has one
    thread."""
    on_cpu = complete.run("check", NPROC="1", OMP_NUM_THREADS="2")
    assert on_cpu.stdout == f"ran data/demo_corpus.py\nchecked 0 1 2 None demo_data {OWN}\n"
    folder = complete.repository / "data" / "shards"
    folder.mkdir()
    (folder / "fineweb_train_000000.bin").touch()
    gpus = {"GPUS": "2", "USABLE": "1", "DATA_PATH": str(folder)}
    on_gpus = complete.run("check", **gpus)
    ranks = [f"checked {rank} 2 1 0.41 {folder} {OWN}" for rank in range(2)]
    assert sorted(on_gpus.stdout.splitlines()) == ranks and on_gpus.returncode == 0
    (complete.repository / "tools" / "check_machine.py").write_text("import sys; sys.exit(1)")
    assert complete.run("check", **gpus).returncode == 1
    no_data = complete.run("check", **gpus | {"DATA_PATH": "nowhere"})
    assert no_data.returncode == 1 and "has no fineweb_train_NNNNNN.bin" in no_data.stderr


def test_the_tests_get_one_process_more_than_the_cores(machine):
    machine.complete()
    (machine.root / "site" / "pytest").mkdir()
    (machine.root / "site" / "pytest" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    result = machine.run("test", "-x")
    words = "'-q', '-n', '2', '--maxprocesses', '8', '--dist', 'worksteal', '-x'"
    assert result.stdout == f"[{words}]\n", result.stderr


def test_the_demonstration_has_the_settings_of_its_tool(complete):
    """Values may have spaces. As many ranks as NPROC says are started."""
    (complete.repository / "tools" / "demo_settings.py").write_text(
        "print('DATA_PATH=a b\\nNPROC=2\\nRUN_ID=demo')"
    )
    shown = ["RANK", "WORLD_SIZE", "DATA_PATH", "RUN_SH"]
    show = f"import os; print('rank', *map(os.environ.get, {shown}))"
    (complete.repository / "train_gpt.py").write_text(show)
    result = complete.run()
    ranks = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {rank} 2 a b {OWN}" for rank in range(2)], result.stderr


def test_the_end_says_how_to_go_on(machine):
    """With .venv, also how to activate it, unless it is."""
    activate = "    source .venv/bin/activate\n"
    evaluate = "    EVAL_ONLY=logs/demo.npz python train_gpt.py\n"
    machine.python(machine.repository / ".venv" / "bin" / "python")
    machine.torch(machine.repository / ".venv" / "site")
    result = machine.run()
    assert "\nnext:\n" + activate in result.stdout and evaluate in result.stdout
    active = machine.run(VIRTUAL_ENV=str(machine.repository / ".venv"))
    assert activate not in active.stdout and evaluate in active.stdout
    shutil.rmtree(machine.repository / ".venv")
    machine.complete()
    plain = machine.run()
    assert activate not in plain.stdout
    assert evaluate.replace("python train", "python3 train") in plain.stdout


def test_the_end_names_the_data_that_were_given(complete, tmp_path):
    """Also for a sweep; quoted, and right if run.sh was started in another folder."""
    (tmp_path / "here").mkdir()
    given = {"DATA_PATH": "my data", "cwd": tmp_path / "here"}
    data = str(tmp_path / "here" / "my data").replace(" ", "\\ ")
    lines = complete.run(**given).stdout.partition("\nnext:\n")[2].splitlines()
    assert lines[0] == f"    cd {complete.repository}"
    assert lines[-1] == f"    DATA_PATH={data} SEEDS='1337 42 2025' ./run.sh"
    result = complete.run(GPUS="8", USABLE="1", **given)
    command = f"run: cd {complete.repository} && python3 data/download_fineweb.py\n"
    assert result.stderr.endswith(command)
    other = complete.run(GPUS="8", USABLE="1", DATA_PATH="data/fineweb10B_sp8192_caseops")
    assert other.stderr.endswith("data/download_fineweb.py --variant sp8192_caseops\n")
    result = complete.run(GPUS="8", USABLE="1", RUN_ID="own text")
    sample, evaluate, *_ = result.stdout.partition("\nnext:\n")[2].splitlines()
    assert "logs/own text.npz" in shlex.split(sample)
    assert "EVAL_ONLY=logs/own text.npz" in shlex.split(evaluate)


def test_the_end_repeats_the_users_settings_and_the_prompt(complete):
    """They are those that run.sh names. Text that is not Python begins with "The ", and no text of the
    demonstration is made beside it."""
    (complete.repository / "tools" / "report.py").write_text("import sys; print(sys.argv[1:])")
    given = {"MAX_WALLCLOCK_SECONDS": "30", "DEVICE": "cpu", "VOCAB_SIZE": "9", "NPROC": "1"}
    made, _, end = complete.run(**given).stdout.partition("\nnext:\n")
    sample, *_, seeds = end.splitlines()
    settings = dict(word.split("=") for word in shlex.split(seeds)[:-1])
    assert settings == given | {"SEEDS": "1337 42 2025"}
    assert shlex.split(sample)[-1] == "def __init__(self,"
    assert "demo_corpus" in made and "'--prompt', 'def __init__(self,'" in made
    own, _, end = complete.run(DATA_PATH="mine").stdout.partition("\nnext:\n")
    assert shlex.split(end.splitlines()[0])[-1] == "The "
    assert "demo_corpus" not in own and "'--prompt', ''" in own
    # The artifact has the score's knobs. Each rank hands on what its own documents taught.
    *_, evaluate, _ = complete.run(NGRAM_TILT="1", NPROC="2").stdout.splitlines()
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
    assert result.stdout.partition("\nnext:\n")[0] == TRAINING, result.stderr
    assert f"    cd {complete.repository}\n" in result.stdout
    assert not list(places[1].iterdir()) and len(list(places[0].iterdir())) == 2


def test_requirements_are_what_is_imported():
    """And the README and the image install them."""
    tree = ast.parse((ROOT / "train_gpt.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imported |= {alias.name for node in imports for alias in node.names}
    imported = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    needed = set(requirements("requirements.txt"))
    assert needed <= imported and imported - needed <= OPTIONAL
    readme = (ROOT / "README.md").read_text()
    words, *_ = re.findall(r"^pip install (.*?)(?:  #.*)?$", readme, re.M)
    assert words.strip() == "-r requirements-dev.txt"
    assert "\n-r requirements.txt\n" in (ROOT / "requirements-dev.txt").read_text()
    image = (ROOT / "Dockerfile").read_text()
    assert "COPY requirements.txt requirements-dev.txt /opt/golf/\n" in image
    assert "-r /opt/golf/requirements-dev.txt" in image


def test_requirements_are_ranges_and_the_constraints_are_in_them():
    """A range of torch keeps a pod's; the constraints are the versions that the tests run with."""
    wanted = requirements("requirements-dev.txt")
    versions = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text()))
    assert wanted.keys() == versions.keys()
    for package, requirement in wanted.items():
        assert "==" not in requirement or package == "ruff"
        specifier = SpecifierSet(requirement.removeprefix(package))
        assert versions[package] in specifier, requirement
    torch = SpecifierSet(wanted["torch"].removeprefix("torch"))
    assert "2.9.1+cu128" in torch and "2.15.0" in torch
    assert "2.8.0" not in torch and "2.16.0" not in torch


@pytest.mark.parametrize(
    "word, status, last", [("--help", 0, ""), ("tset", 1, "run.sh has no command tset\n")]
)
def test_run_sh_usage(word, status, last, tmp_path):
    result = subprocess.run([ROOT / "run.sh", word], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == status and "./run.sh test" in result.stdout + result.stderr
    assert result.stderr.endswith(last)
