"""tools/launch.py: ranks start with what torch needs to find each other, and end together."""

import os
import re
import signal
import sys

import pytest

import launch
import warm_python
from conftest import ROOT, run, start

pytestmark = pytest.mark.usefixtures("nothing_is_left_running")


def started(folder, code, ranks=2, **environment):
    """The launcher of ranks that run this Python code."""
    code = "import os, pathlib, signal, sys, time\nrank = os.environ['RANK']\n" + code
    command = [launch.__file__, sys.executable, "-IS", "-c", code]
    environment["NPROC"] = str(ranks)
    return start(command, environment, folder, fresh=True, start_new_session=True)


def test_ranks_have_the_variables_of_torchrun(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    show = f"os.write(1, (' '.join(map(os.environ.get, {names.split()})) + '\\n').encode())"
    process = started(tmp_path, show, ranks=3)
    out, error = process.communicate()
    lines = sorted(line.split() for line in out.splitlines())
    assert process.returncode == 0 and error == ""
    assert lines == [[rank, rank, "3", "3", "127.0.0.1", lines[0][-1]] for rank in "012"]
    assert int(lines[0][-1]) > 0


KILLED = "error: rank 1 was killed by SIGKILL: is the memory full?"
CUT = "error: rank 1 was killed by SIGBUS: is a library in the compile cache cut, or /dev/shm full?"


@pytest.mark.parametrize(
    "failing, act, sentence, status",
    [
        (0, "sys.exit('error: mine')", "error: mine", 1),
        (2, "sys.exit('error: mine')", "error: mine", 1),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", KILLED, 137),
        (1, "os.kill(os.getpid(), signal.SIGBUS)", CUT, 128 + signal.SIGBUS),
    ],
)
def test_a_rank_that_fails_or_is_killed_ends_the_others(failing, act, sentence, status, tmp_path):
    process = started(tmp_path, f"if rank == '{failing}': {act}\ntime.sleep(600)", ranks=3)
    assert process.communicate() == ("", f"{sentence}\n") and process.returncode == status


def test_a_rank_that_does_not_end_is_killed(tmp_path):
    """The status is still that of the first failure."""
    code = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    pathlib.Path("ignores").touch()
    time.sleep(600)
while not pathlib.Path("ignores").exists():
    time.sleep(0.01)
sys.exit(3)
"""
    launched = f"import launch, sys; launch.GRACE = 0.1; sys.exit(launch.launch([sys.executable, '-c', {code!r}], 2))"
    run(["-c", launched], {"PYTHONPATH": str(ROOT / "tools")}, tmp_path, fresh=True, status=3)


def test_ctrl_c_is_one_sentence_of_rank_0(tmp_path):
    """In a terminal, Ctrl-C reaches the launcher's process group."""
    code = """
pathlib.Path(rank).touch()
try:
    if rank == "0":
        while not pathlib.Path("1").exists():
            time.sleep(0.01)
        print("waits", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)
"""
    process = started(tmp_path, code)
    assert process.stdout.readline() == "waits\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[1] == "error: interrupted\n" and process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_ranks_do_not_outlive_the_launcher(number, tmp_path):
    process = started(tmp_path, "print('waits', flush=True)\ntime.sleep(600)")
    assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
    os.kill(process.pid, number)
    assert re.fullmatch(r"error: rank \d was killed by SIGTERM\n", process.communicate()[1])
    assert process.returncode == 143


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_ranks_get_sigterm_when_the_launcher_is_killed(tmp_path):
    """A training then ends after its step, with a checkpoint."""
    code = "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(rank).touch() or os._exit(0))\n"
    process = started(tmp_path, f"{code}print('waits', flush=True)\ntime.sleep(60)")
    assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
    process.kill()
    assert process.communicate() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"NUM_LAYERS": "no"}, "NUM_LAYERS='no' is not a whole number"),
        ({"RUN_ID": "r", "CHECKPOINT_EVERY": 4}, "checkpoints/r holds an earlier run"),
    ],
)
def test_two_ranks_of_the_script_print_one_sentence(env, tmp_path, changes, sentence):
    """Found by all ranks before their group exists: none waits for another. Found by the first
    alone: the launcher's SIGTERM is no error of the others."""
    (tmp_path / "checkpoints" / "r").mkdir(parents=True)
    (tmp_path / "checkpoints" / "r" / "step_00000004.npz").touch()
    command = [launch.__file__, warm_python.python(), ROOT / "train_gpt.py"]
    told = run(command, env(**changes, NPROC=2), tmp_path, status=1).stderr
    assert sentence in told and told.count("error:") == told.count("\n") == 1, told


@pytest.mark.parametrize("ranks", ["0", "two"])
def test_a_wrong_number_of_ranks_is_an_error(ranks, tmp_path):
    process = started(tmp_path, "", ranks)
    sentence = f"error: NPROC={ranks} is not a number of processes: set for example NPROC=2\n"
    assert process.communicate() == ("", sentence) and process.returncode == 1
