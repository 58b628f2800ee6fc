#!/usr/bin/env python3
"""Start the ranks of one run on this machine, and end them together.

    NPROC=2 python tools/launch.py python train_gpt.py

Runs the command NPROC times, with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT as torchrun sets them. When a rank fails, the others are terminated, wherever they wait
for it; on Linux also when this program is killed. A mistake and Ctrl-C are one sentence of rank 0;
torchrun would add a traceback of 33 lines. Needs no package.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys

LIBC = ctypes.CDLL(None)  # loaded before a fork
HINTS = {
    signal.SIGKILL: ": is the memory full?",
    # A compiler that was killed leaves such a library.
    signal.SIGBUS: ": is a library in the compile cache cut, or /dev/shm full?",
}
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def first_failure(processes: list[subprocess.Popen]) -> int:
    """Wait until a rank fails or all have ended. Returns the exit status as shells count it."""
    running = {process.pid: rank for rank, process in enumerate(processes)}
    while running:
        pid, status = os.wait()
        rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        processes[rank].returncode = code
        if code < 0:  # it could not say why
            killed = f"rank {rank} was killed by {signal.Signals(-code).name}"
            print(f"error: {killed}{HINTS.get(-code, '')}", file=sys.stderr, flush=True)
        if code:
            return code if code > 0 else 128 - code
    return 0


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have Linux send this signal to this process when its parent dies."""
    if sys.platform == "linux":
        LIBC.prctl(1, number)  # PR_SET_PDEATHSIG


def launch(command: list[str], ranks: int) -> int:
    """Run the ranks to their end. Returns the exit status of the first that failed, or 0."""
    processes = []
    signal.signal(signal.SIGINT, lambda *_: processes and processes[0].send_signal(signal.SIGINT))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: [process.terminate() for process in processes])
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in map(str, range(ranks)):
        environ = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank}
        # In a group of its own, which the terminal's Ctrl-C does not reach: every rank would print
        # a sentence.
        options = {"process_group": 0, "preexec_fn": end_with_parent}
        processes.append(subprocess.Popen(command, env=environ, **options))
    status = first_failure(processes)
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return status


def wanted_ranks(default: int = 1) -> int:
    """NPROC. Ends the program if it is no number."""
    ranks = os.environ.get("NPROC", str(default))
    if not ranks.isdecimal() or int(ranks) < 1:
        sys.exit(f"error: NPROC={ranks} is not a number of processes: set for example NPROC=2")
    return int(ranks)


def main() -> None:
    kept = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kept)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command that starts a rank")
    command = parser.parse_args().command
    if not command or not shutil.which(command[0]):
        name = " ".join(command[:1]) or "an empty command"
        parser.error(f"{name} cannot be run; give for example: python train_gpt.py")
    sys.exit(launch(command, wanted_ranks()))


if __name__ == "__main__":
    main()
