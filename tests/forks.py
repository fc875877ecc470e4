"""Processes of one federation, forked from that of the tests, which has imported everything."""

import multiprocessing
import os
import socket
import sys
import time
import warnings
from pathlib import Path

CONTEXT = multiprocessing.get_context("fork")


class Started:
    """Processes that run a function, each told its rank as torchrun tells it; one is told nothing.

    Args:
        count: How many.
        output: File that what they print is added to.
        function: A function of a module.
        arguments: Passed to it.
    """

    def __init__(self, count, output, function, *arguments):
        self.output = output
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            CONTEXT.Process(
                target=_run,
                args=(_told(rank, count, port), str(output), function, arguments),
                name=f"process {rank} of {count}",
                daemon=True,
            )
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def finish(self, timeout=240):
        """Wait for all of them; return their exit codes and what they printed."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes], Path(self.output).read_text()

    def send(self, signal):
        """Send a signal to the first, if it has not ended."""
        if self.processes[0].is_alive():
            os.kill(self.processes[0].pid, signal)


def _told(rank, count, port):
    if count == 1:
        return {}
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


def _run(environment, output, function, arguments):
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    # Not those of pytest, which captures what tests print and makes warnings errors.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    warnings.resetwarnings()
    warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
    function(*arguments)
