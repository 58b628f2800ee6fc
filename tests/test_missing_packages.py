"""Programs without a package that they need."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "tools"))

import check_record

PROGRAMS = [
    path
    for folder in ("bench", "data", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text() and path.name != "launch.py"  # which needs none
]


@pytest.mark.parametrize("path", [ROOT / "train_gpt.py", *PROGRAMS], ids=lambda path: path.stem)
def test_a_python_without_packages_is_one_sentence(path, tmp_path):
    """As after ./run.sh without `source .venv/bin/activate`. -S hides the packages."""
    result = subprocess.run(
        [sys.executable, "-SE", path, "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    expected = "error: No module named 'numpy': run `source .venv/bin/activate`, or `pip install -r requirements.txt`\n"
    assert result.stderr == expected and result.returncode == 1


@pytest.mark.parametrize(
    "program, package",
    [
        ("compare --help", "scipy"),
        ("plot --help", "matplotlib"),
        ("report --html x.html x.txt", "plotly"),
        ("report --html x.html x.txt", "jinja2"),
    ],
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
    for code, status in (
        ("import torch", "ok"),
        ("with a():\n    import torch\n    import numpy", "FAIL"),
    ):
        found = next(iter(check_record.packages(SimpleNamespace(path=tmp_path), ast.parse(code))))
        assert found.status == status, found
