"""`pip install .`: `import quantise` in any program. Run and test the rest from the clone."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class Build(build_py):
    """pyproject.toml can only list modules of one folder."""

    def find_modules(self):
        paths = ("tools/quantise.py", "train_gpt.py")
        return [("", Path(path).stem, path) for path in paths]


setup(cmdclass={"build_py": Build}, py_modules=["quantise", "train_gpt"])
