"""Commands as real processes, forked from one that has imported the libraries: 0.2 instead of 3 seconds.

A forked process has its own folder, standard streams, signals and exit code. What it does not test is the start of an
interpreter; tests of that use `python -m viper`.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import gc, json, os, socket, sys
import formulaic, pandas, sklearn.linear_model, sklearn.model_selection, torch, viper.cli.app, viper.models.saving
from viper.cli import main
requests = socket.socket(fileno=int(sys.argv[1]))
gc.freeze()  # otherwise every process collects what it shares with this one when it ends
while True:
    text, streams, _, _ = socket.recv_fds(requests, 1 << 16, 3)
    if not text:
        break
    process = os.fork()
    if process == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        request = json.loads(text)
        os.chdir(request["folder"])
        main(request["arguments"])  # exits as the program does
    for stream in streams:
        os.close(stream)
    requests.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
"""


@cache
def server() -> socket.socket:
    """Start the process that has imported the libraries; it ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(ours.close)  # runs first
    return ours


def run_viper(*arguments, folder: Path, output=None) -> subprocess.CompletedProcess:
    """Run a command in a folder. Its standard output goes to the open file `output`, if there is one."""
    with Path(os.devnull).open() as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [nothing, output or out, err]
        request = json.dumps({"arguments": [str(one) for one in arguments], "folder": str(folder)})
        socket.send_fds(server(), [request.encode()], [stream.fileno() for stream in streams])
        code = int(server().recv(16))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), err.read().decode())
