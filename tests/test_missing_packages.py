"""How programs start, without a package or on an old Python, and how they end."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest

import check_record
from conftest import ROOT, run

FILES = [path for folder in ("bench", "data", "tools") for path in (ROOT / folder).glob("*.py")]
PROGRAMS = [path for path in sorted(FILES) if "__main__" in path.read_text()]
PROGRAMS.remove(ROOT / "tools" / "launch.py")  # which needs none


@pytest.mark.parametrize("path", [ROOT / "train_gpt.py", *PROGRAMS], ids=lambda path: path.stem)
def test_a_python_without_packages_is_one_sentence(path, tmp_path):
    """As after ./run.sh without `source .venv/bin/activate`. -S hides the packages."""
    command = [sys.executable, "-SE", path, "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    advice = "run `source .venv/bin/activate`, or `pip install -r requirements.txt`"
    assert result.stderr == f"error: No module named 'numpy': {advice}\n"
    assert result.returncode == 1


@pytest.mark.parametrize("path", [ROOT / "train_gpt.py", *PROGRAMS], ids=lambda path: path.stem)
def test_waiting_openmp_threads_sleep(path, tmp_path):
    """On a busy machine spinning ones made a sample slow. OpenMP reads it with torch."""
    for name in ("numpy", "sentencepiece"):
        (tmp_path / f"{name}.py").touch()
    code = "import os, sys; sys.exit(f\"policy {os.environ.get('OMP_WAIT_POLICY')}\")"
    (tmp_path / "torch.py").write_text(code)
    given = {"OMP_WAIT_POLICY": "ACTIVE"} if path.name == "train_gpt.py" else {}
    environment = {"PYTHONPATH": str(tmp_path), **given}
    command = [sys.executable, "-S", path, "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stderr == f"policy {'ACTIVE' if given else 'PASSIVE'}\n"


def test_an_older_python_is_one_sentence():
    """Python 3.8 can parse the file up to the end."""
    source = (ROOT / "train_gpt.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    old = "import runpy, sys; sys.version_info = (3, 10, 12); sys.version = '3.10.12 (main)'; "
    code = f"{old}runpy.run_path({str(ROOT / 'train_gpt.py')!r})"
    result = subprocess.run([sys.executable, "-SE", "-c", code], capture_output=True, text=True)
    expected = "error: this needs Python 3.11 or later, and this is 3.10.12\n"
    assert result.stderr == expected and result.returncode == 1


def test_what_is_older_than_the_training_is_freed_at_the_end(env, tmp_path):
    """Objects that the garbage collector still ignored made thirty lines of "nanobind: leaked" with
    Triton 3.9."""
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
    assert result.returncode == 0 and result.stdout.endswith("train_gpt.py\nfreed\n"), result


@pytest.mark.parametrize(
    "program, package", [("plot --help", "matplotlib"), ("report --html x.html x.txt", "plotly")]
)
def test_a_missing_package_of_a_tool_is_one_sentence(program, package, tmp_path):
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError('No module named it')")
    name, *words = program.split()
    result = run([ROOT / "tools" / f"{name}.py", *words], {"PYTHONPATH": str(tmp_path)}, tmp_path)
    install = "`pip install -r requirements-dev.txt`"
    outside = sys.prefix == sys.base_prefix  # of a virtual environment
    advice = f"run {'`source .venv/bin/activate`, or ' * outside}{install}"
    assert result.stderr == f"error: No module named it: {advice}\n" and result.returncode == 1


def test_packages_that_a_script_imports_at_its_top_must_be_listed(tmp_path):
    """Also inside a `with` that explains a failed import, as train_gpt.py has it."""
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    inside = "with a():\n    import torch\n    import numpy"
    for code, status in (("import torch", "ok"), (inside, "FAIL")):
        found = next(iter(check_record.packages(SimpleNamespace(path=tmp_path), ast.parse(code))))
        assert found.status == status, found
