"""A Python that starts with torch imported: in 0.1 s of CPU, where the imports of a run take 4 s.

A server, one for each process of pytest, imports the slow modules. `python()` returns the path of a
program that runs the arguments of python (-B, -u, SCRIPT ..., -c CODE ..., -m MODULE ...) in a fork
of the server, with their own folder, environment, streams, signals and exit status. It is the
fork's sys.executable, so torchrun and the tools start their processes in the same way.

What Python, OpenMP and torch read when they start is fixed in a fork. Where the environment sets
such a variable otherwise, for other options of Python, and with more than three open files the
program becomes an ordinary Python. All forks share the seed of str.__hash__, so tests of equal runs
start some of them without it.
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
FOLLOWED = {"-B": "PYTHONDONTWRITEBYTECODE", "-u": "PYTHONUNBUFFERED"}
LARGEST = 150_000  # bytes of a request, which is one packet


# ---- The program. It needs no package and imports little. ----------------------------------------
def ask(program: str, interpreter: str, *arguments: str) -> None:
    """Have the arguments run in a fork, and end as it ends."""
    while arguments[0] in FOLLOWED:
        os.environ[FOLLOWED[arguments[0]]] = "1"
        arguments = arguments[1:]
    special = {name for name in os.environ if name.startswith(READ_AT_START)}
    fixed = all(os.environ[n] == FIXED.get(n) for n in special - {*FOLLOWED.values()})
    inherited = any(os.path.exists(f"/proc/self/fd/{n}") for n in (3, 4))
    if inherited or not fixed or (arguments[0][:1] == "-" and arguments[0] not in ("-c", "-m")):
        os.execv(interpreter, [interpreter, *arguments])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{program}.socket")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    request = (program, arguments, os.getcwd(), dict(os.environ))
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


def serve(listener: socket.socket, running: dict) -> tuple:
    """Fork for each client until standard input ends: pass its signals on, the exit status back. If
    a client is gone, kill its process. Returns in the forks: request and streams. `running` gets
    (process, client, pidfd) by client and by pidfd."""
    while 0 not in (ready := select.select([0, listener, *running], [], [])[0]):
        if listener in ready:
            client, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
            _, arguments, folder, _ = request = marshal.loads(message)
            with contextlib.suppress(Exception):  # what is no script fails in the fork
                path = os.path.join(folder, arguments[0])
                compiled(path, os.stat(path).st_mtime_ns)
            process = os.fork()
            if process == 0:
                return request, streams
            for stream in streams:
                os.close(stream)
            ended = os.pidfd_open(process)
            running[client] = running[ended] = process, client, ended
        for process, client, ended in {running[one] for one in ready if one in running}:
            if ended in ready:
                with contextlib.suppress(OSError):  # the client is gone
                    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    client.send(str(status).encode())
                running.pop(client, None)
                del running[ended]
                client.close()
                os.close(ended)
            elif number := client.recv(1):
                os.kill(process, number[0])
            else:
                os.kill(process, signal.SIGKILL)
                del running[client]
    os.killpg(0, signal.SIGKILL)


# ---- The fork ------------------------------------------------------------------------------------
def become(request: tuple, streams: list[int]) -> None:
    """Be the Python that the client asked for, and run its arguments."""
    import io
    import runpy
    import types

    sys.executable, arguments, folder, environ = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)  # also what `running` holds
    sys.dont_write_bytecode = FOLLOWED["-B"] in environ
    # A new one, as the server's knows whether its own file can seek.
    stdout = open(1, "wb", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(stdout, write_through=FOLLOWED["-u"] in environ)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = [*arguments[1:]], folder
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        code = compile(arguments[1], "<string>", "exec")
    else:
        main.__file__ = path = os.path.join(folder, arguments[0])
        sys.argv, sys.path[0] = [*arguments], os.path.dirname(os.path.realpath(path))
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
        except (Exception, KeyboardInterrupt) as error:
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
    import subprocess
    import tempfile

    if sys.platform != "linux":
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="warm_python")
    program, ours, python.kept = f"{folder.name}/python", f'"{sys.executable}"', [folder]
    with open(program, "w", opener=functools.partial(os.open, mode=0o755)) as file:
        file.write(f'#!/bin/sh\nexec {ours} -IS "{__file__}" ask "$0" {ours} "$@"\n')
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
    python.kept.append(server)
    return program


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        preload()
        running: dict = {}  # kept, so that nothing in it is closed in a fork
        listener = socket.socket(fileno=int(sys.argv[2]))
        finish(become, *serve(listener, running))
