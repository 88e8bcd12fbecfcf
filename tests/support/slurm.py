"""A Slurm cluster of two nodes on this machine: a real slurmctld and two real slurmd, under the caller's account.

It needs the programs of Slurm (Debian: slurm-wlm) and nothing else: no munge, no root, no change outside its folder.
Nodes are named after addresses of the loopback device, so that their names resolve.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.processes import wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue")
NODES = ("127.0.0.1", "127.0.0.2")
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
START_SECONDS = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=60
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=4 State=UNKNOWN\n"


def is_installed() -> bool:
    return all(map(_program, PROGRAMS))


def _program(name: str) -> str | None:
    """Debian keeps daemons in sbin, which is not in the path of every user."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


class Cluster:
    """Starts the daemons and waits until the nodes are idle."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """`environment` is added to that of jobs; variables of Slurm and of other launchers are removed from it."""
        self._folder = folder
        (folder / "state").mkdir(parents=True)
        configuration = folder / "slurm.conf"
        configuration.write_text(_configuration(folder))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
        self.environment = {**kept, **environment, "SLURM_CONF": str(configuration)}
        self._daemons = [self._daemon("slurmctld", "-D")]
        wait_until(lambda: self._call("scontrol", "ping", check=False).stdout.count(" UP") > 0, START_SECONDS)
        self._daemons += [self._daemon("slurmd", "-D", "-N", node) for node in NODES]
        wait_until(lambda: self._states() == ["idle"] * len(NODES), START_SECONDS)

    def _daemon(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{name}.out", "ab") as output:
            return subprocess.Popen(
                [str(_program(name)), *arguments], env=self.environment, stdout=output, stderr=output
            )

    def _call(
        self, *command: str, check: bool = True, folder: Path | None = None, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=seconds
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done

    def _states(self) -> list[str]:
        return self._call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T", check=False).stdout.split()

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), folder: Path) -> str:
        """Submits a batch script from `folder`; the job's number. Its log is `log-<job>` there."""
        command = ["sbatch", "--parsable", f"--output={folder}/log-%j", *options, str(script), *arguments]
        return self._call(*command, folder=folder).stdout.strip()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        words = self._call("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def finish(self, job: str, seconds: float, progress: Callable[[], object] | None = None) -> str:
        """Waits until the job is over and is not queued again; its state. `progress` is as in `wait_until`."""
        wait_until(lambda: self.state(job) in FINISHED, seconds, progress)
        return self.state(job)

    def wait_for_restart(
        self, job: str, seconds: float, progress: Callable[[], object] | None = None, **changes: str
    ) -> None:
        """Waits until the job has been queued again, and lets it run, in a few seconds instead of two minutes and with
        more time: on a busy machine a second start may take longer than the limit that interrupted the first.
        `changes`: of its fields."""
        wait_until(lambda: self.field(job, "Restarts") != "0" or self.state(job) in FINISHED, seconds, progress)
        assert self.state(job) not in FINISHED, f"job {job} ended instead: {self.state(job)}"
        wait_until(lambda: self.state(job) == "PENDING", seconds)
        fields = [f"{name}={value}" for name, value in changes.items()]
        self._call("scontrol", "update", f"JobId={job}", *fields, "StartTime=now+4", "TimeLimit=60")

    def reach_time_limit(self, job: str) -> None:
        """Leaves the job one or two more minutes."""
        hours, minutes, _ = self.field(job, "RunTime").split(":")
        self._call("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")

    def cancel(self, *arguments: str) -> None:
        self._call("scancel", *arguments, check=False)

    def signal(self, job: str) -> None:
        """Sends SIGTERM to the job's tasks. scancel does not return for a job that is just being queued again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._call("scancel", "--signal=TERM", job, check=False, seconds=5)

    def lose(self, node: str) -> None:
        """Slurm counts the node as lost, and ends what runs there."""
        self._call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def repair(self, node: str) -> None:
        self._call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be back by itself

    def close(self) -> None:
        """Ends what still runs, and the daemons."""
        user = f"--user={getpass.getuser()}"
        try:
            for arguments in (("--full", "--signal=KILL", user), (user,)):
                self.cancel(*arguments)
            wait_until(lambda: not self._call("squeue", "--noheader", check=False).stdout.strip(), START_SECONDS)
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                daemon.wait(timeout=30)


def _configuration(folder: Path) -> str:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in (*NODES, "controller")]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    text = CONFIGURATION.format(controller_port=ports[-1], user=getpass.getuser(), folder=folder)
    host = socket.gethostname()
    return text + "".join(
        NODE.format(name=node, host=host, port=port) for node, port in zip(NODES, ports, strict=False)
    )
