"""The programs of tools/, data/ and bench/ as a new user meets them: --help, and one sentence for a
mistake."""

import pytest

import program
import train_gpt
from conftest import ROOT, run

FILES = [
    path for folder in ("tools", "data", "bench") for path in sorted((ROOT / folder).glob("*.py"))
]
PROGRAMS = [path for path in FILES if '\nif __name__ == "__main__":\n' in path.read_text()]


def test_every_program_ends_in_one_way():
    own = [path.name for path in PROGRAMS if not path.read_text().endswith("run_program(main)\n")]
    assert own == ["launch.py"], "it needs no package, so it cannot import train_gpt"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_answers_help(path, tmp_path):
    result = run([path, "--help"], {}, tmp_path)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert result.stdout.startswith(f"usage: {path.name} ") and "--help" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "mistake, status, sentence",
    [
        ("UserError('X=1 is wrong: unset it')", 1, "error: X=1 is wrong: unset it"),
        ("FileNotFoundError(2, 'No', 'a/b')", 1, "error: cannot use a/b: No; check the path"),
        ("KeyboardInterrupt", 130, "error: interrupted by Ctrl-C"),
    ],
)
def test_a_mistake_is_one_sentence(mistake, status, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        program.run_program(lambda: exec(f"raise {mistake}", vars(train_gpt)))
    printed = capsys.readouterr().err.strip()
    # sys.exit(sentence) exits with 1
    assert (ended.value.code, printed) in ((status, sentence), (sentence, ""))
