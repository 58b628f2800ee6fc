"""A Python that starts with torch imported: in 0.1 s of CPU, where the imports of a run take 4 s.

A server, one for each process of pytest, imports the slow modules and waits. `python()` returns the
path of a program that takes the arguments of python (-B, -u, SCRIPT ..., -c CODE ..., -m MODULE
...) and runs them in a fork of the server, with their own folder, environment, standard streams,
signals and exit status. The fork's sys.executable is that program, so torchrun and the tools start
their processes in the same way.

What Python, OpenMP and torch read when they start is fixed in a fork. The program becomes an
ordinary Python if its environment sets such a variable otherwise, for other options of Python, and
if it inherits more than three open files. All forks of a server share the seed of str.__hash__, so
tests of equal runs start some of them without it.
"""

import contextlib
import functools
import marshal
import os
import select
import signal
import socket
import sys

READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_LOGS", "TORCHINDUCTOR_")
FIXED = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
FOLLOWED = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")  # as -B and -u
LARGEST = 150_000  # bytes of a request, which is one packet


# ---- The program. It needs no package and imports little. ----------------------------------------
def fits(rest: list[str]) -> bool:
    """Whether a fork does what a new Python would do with these arguments."""
    known = rest[:1] in (["-c"], ["-m"]) or (rest and not rest[0].startswith("-"))
    special = {name for name in os.environ if name.startswith(READ_AT_START)} - {*FOLLOWED}
    inherited = any(os.path.exists(f"/proc/self/fd/{n}") for n in (3, 4))
    return known and not inherited and all(os.environ[n] == FIXED.get(n) for n in special)


def ask(program: str, interpreter: str, arguments: list[str]) -> None:
    """Have the arguments run in a fork, and end as it ends."""
    count = next((i for i, word in enumerate(arguments) if word not in ("-B", "-u")), 0)
    options, rest = arguments[:count], arguments[count:]
    if not fits(rest):
        os.execv(interpreter, [interpreter, *arguments])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{program}.socket")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    request = (program, options, rest, os.getcwd(), dict(os.environ))
    socket.send_fds(server, [marshal.dumps(request)], [0, 1, 2])
    status = int(server.recv(16) or 1)
    if status < 0:  # killed by a signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# ---- The server ----------------------------------------------------------------------------------
def preload() -> None:
    """Import what runs, torchrun and tools import. Forks have modules, but would not have threads."""
    import gc
    from importlib import import_module

    for module in ["constriction", "sentencepiece", "torch._dynamo", "torch.distributed.run"]:
        import_module(module)
    del sys.modules["torch.distributed.run"]  # -m imports it again, and would warn
    assert len(os.listdir("/proc/self/task")) == 1, "the server has threads"
    gc.collect()
    gc.freeze()  # collections in a fork would copy every page


@functools.cache
def compiled(path: str, changed: int):
    """The code of a script. Compiling train_gpt.py takes 0.3 s."""
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec")


def serve(listener: socket.socket) -> tuple:
    """Fork for each client until standard input ends. Returns in the forks: request and streams."""
    while listener in select.select([0, listener], [], [])[0]:
        client, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
        _, _, arguments, folder, _ = request = marshal.loads(message)
        with contextlib.suppress(Exception):  # what is no script fails in the fork
            path = os.path.join(folder, arguments[0])
            compiled(path, os.stat(path).st_mtime_ns)
        if os.fork() == 0:
            listener.close()
            os.close(0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process = os.fork()
            if process == 0:
                client.close()
                return request, streams
            attend(client, process, streams)
        client.close()
        for stream in streams:
            os.close(stream)
    os.killpg(0, signal.SIGKILL)


def attend(client: socket.socket, process: int, streams: list[int]) -> None:
    """Pass the client's signals on, the exit status back. If the client is gone, kill its process."""
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(process)
    while ended not in select.select([client, ended], [], [])[0]:
        number = client.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
    with contextlib.suppress(OSError):  # the client is gone
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
    os._exit(0)


# ---- The fork ------------------------------------------------------------------------------------
def become(request: tuple, streams: list[int]) -> None:
    """Be the Python that the client asked for, and run its arguments."""
    import io
    import types

    sys.executable, options, arguments, folder, environ = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.dont_write_bytecode = "-B" in options or FOLLOWED[0] in environ
    # A new one, as the server's knows whether its own file can seek.
    through = "-u" in options or FOLLOWED[1] in environ
    stdout = open(1, "wb", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(stdout, write_through=through)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[0] == "-m":
        import runpy

        sys.argv, sys.path[0] = arguments[1:], folder
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        code = compile(arguments[1], "<string>", "exec")
    else:
        path = os.path.join(folder, arguments[0])
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        main.__file__ = path
        code = compiled(path, os.stat(path).st_mtime_ns)
    exec(code, vars(main))


def finish(act, *arguments) -> None:
    """Call this and end as Python does, but do not free memory, which takes 1 s after a fork."""
    import atexit
    import threading

    status = 0
    try:
        try:
            act(*arguments)
        except SystemExit:
            raise
        except BaseException as error:
            status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ended:  # also of that hook
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- The test process ----------------------------------------------------------------------------
@functools.cache
def python() -> str:
    """The path of the program. It starts the server, which ends with this process. Only Linux can
    fork safely with torch loaded; elsewhere this is sys.executable."""
    import atexit
    import pathlib
    import shutil
    import subprocess
    import tempfile

    if sys.platform != "linux":
        return sys.executable
    folder = pathlib.Path(tempfile.mkdtemp(prefix="warm_python"))
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" ask "$0" "{sys.executable}" "$@"\n'
    )
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{program}.socket")
        listener.listen(100)
        environ = {n: v for n, v in os.environ.items() if not n.startswith(READ_AT_START)}
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            env=environ | FIXED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # a fork's may be one, and Python keeps whether it can seek
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches it through its clients
        )

    def end() -> None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return str(program)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        preload()
        finish(become, *serve(socket.socket(fileno=int(sys.argv[2]))))
