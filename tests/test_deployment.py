"""Several nodes, simulated by processes of one machine: torchrun's launchers, and SLURM's."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import pages
from child import python

PAGE = Path(__file__).parent.parent / "docs" / "tutorials" / "deployment.md"
#: What ``srun`` does for two nodes with one task each: on each node the command, which learns from
#: the environment which one it is.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys

tasks = []
for rank in "01":
    told = {{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | told))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def started():
    """Start processes in sessions of their own, and end them with all that they have started."""
    running = []

    def start(command, folder, log, **more):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with (folder / log).open("a") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | more,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append(process)
        return process

    yield start
    for process in running:
        end(process)


def end(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def arguments(*more):
    return [
        *("fit", "--config", "digits.yaml", "--trainer.max_epochs=6"),
        *("--trainer.enable_progress_bar=false", "--trainer.logger=false", *more),
    ]


def state(folder, runs="digits"):
    path = folder / "runs" / runs / "version_0" / "last.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The model that one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    python("-m", "lightning_fl", *arguments(), cwd=folder, timeout=240)
    return state(folder)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_two_launchers_of_torchrun_train_as_one_process(tmp_path, started, alone):
    parallel = "--trainer.strategy=client_parallel --trainer.num_nodes=2 --trainer.devices=1"
    launcher = "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
    launcher += f" --rdzv-endpoint=127.0.0.1:{free_port()} --local-addr=127.0.0.1 -m lightning_fl"
    command = [sys.executable, *launcher.split(), *arguments(*parallel.split())]
    nodes = [started(command, tmp_path, f"node{i}.txt") for i in range(2)]
    for node in nodes:
        assert node.wait(240) == 0, [p.read_text()[-3000:] for p in tmp_path.glob("node*.txt")]
    assert_same(state(tmp_path), alone)


@pytest.mark.slow
def test_the_slurm_script_trains_on_two_nodes_and_goes_on_after_a_requeue(tmp_path, started, alone):
    script = next(
        code for _, option, code in pages.BLOCK.findall(PAGE.read_text()) if option == "file=job.sh"
    )
    given = "fit --config digits.yaml --trainer.enable_progress_bar=false"
    assert given in script
    (tmp_path / "job.sh").write_text(script.replace(given, " ".join(arguments())))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    path = [tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    slurm = {
        "PATH": os.pathsep.join(map(str, path)),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "digits",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = ["bash", "job.sh"]
    job = started(command, tmp_path, "job.txt", **slurm, MASTER_PORT=str(free_port()))
    table = tmp_path / "runs" / "7" / "version_0" / "rounds.csv"
    limit = time.monotonic() + 240
    while not table.exists() or len(table.read_text().splitlines()) < 3:
        assert time.monotonic() < limit, (tmp_path / "job.txt").read_text()
        assert job.poll() is None, (tmp_path / "job.txt").read_text()
        time.sleep(0.02)
    end(job)  # preempted in the third round, or a later one
    again = {**slurm, "SLURM_RESTART_COUNT": "1", "MASTER_PORT": str(free_port())}
    job = started(command, tmp_path, "job.txt", **again)
    assert job.wait(240) == 0, (tmp_path / "job.txt").read_text()[-3000:]
    assert "Resuming from runs/7/version_0/last.ckpt" in (tmp_path / "job.txt").read_text()
    assert_same(state(tmp_path, "7"), alone)
    assert len(table.read_text().splitlines()) == 1 + 6
