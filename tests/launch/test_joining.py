"""Ranks that come late, never, twice, or from another run: each is named, within join_timeout."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from stepmark.errors import LaunchError, PeerFailed, UsageError
from stepmark.launch.join_clock import JOIN_TIMEOUT, JoinClock, join_timeout
from stepmark.launch.network import address_towards, interface_of, is_loopback
from stepmark.launch.roster import Meeting
from stepmark.launch.store import StoreConnection, open_store
from stepmark.launch.world import World
from stepmark.liveness.failure_report import REPORTS, SECRET
from tests.support.clock import MovedClock
from tests.support.processes import free_port
from tests.support.ranks import Ranks
from tests.support.two_nodes import INTERFACE, available, two_nodes

JOINING = "tests.support.joining_programs:joining"
HOST = socket.gethostname()


def one_of_two(rank: int, port: int, seconds: str = "1") -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), JOIN_TIMEOUT: seconds}


def meeting(store: dist.Store, rank: int, size: int = 2, seconds: float = 30.0, run: str = "") -> Meeting:
    """Of a rank whose clock moves whenever it waits."""
    world = World(rank, size, rank, size, 0, "127.0.0.1", 29400, run=run)
    return Meeting(StoreConnection(store), world, JoinClock(seconds, MovedClock()))


def error_of(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(LaunchError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    error = error_of(meeting(dist.HashStore(), 0).join)
    missing = "1 of 2 ranks has not joined at 127.0.0.1:29400: rank 1"
    assert error.startswith(f"rank 0 on {HOST}: after 30 s (join_timeout) {missing}; look at the output")
    lines = [f"stepmark: {missing}, {passed} s so far; waiting for at most 30 s (join_timeout)" for passed in (10, 20)]
    assert capfd.readouterr().err.splitlines() == lines


def test_a_first_rank_that_never_comes_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    error = error_of(open_store, World(1, 2, 1, 2, 0, "127.0.0.1", port), JoinClock(15.0, MovedClock()))
    where = f"rank 1 on {HOST} cannot reach rank 0 at 127.0.0.1:{port}"
    assert error.startswith(f"{where} within 15 s (join_timeout): Connection refused; look at the output of")
    assert f"stepmark: {where} (Connection refused), 10 s so far" in capfd.readouterr().err


def test_a_first_rank_that_hangs_before_it_joins_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The port is open, because the supervisor holds its socket, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        world = World(1, 2, 1, 2, 0, *listener.getsockname())
        error = error_of(open_store, world, JoinClock(15.0, MovedClock()))
    assert "cannot reach rank 0" in error
    assert "within 15 s (join_timeout): no answer" in error
    assert "(no answer), 11 s so far" in capfd.readouterr().err


def test_the_others_learn_why_the_first_rank_gives_up() -> None:
    """Three of four ranks come, and have different limits."""
    store = dist.HashStore()
    first, *others = (meeting(store, rank, 4, 15.0 if rank == 0 else 100.0) for rank in range(3))
    for each in others:
        each._say_hello()
    error = error_of(first.join)
    assert f"rank 0 on {HOST}: after 15 s" in error
    assert ": rank 3;" in error
    assert first._clock.left < -1.0, "it stays for a second in which they can read that"
    for each in others:
        with pytest.raises(PeerFailed, match=re.escape(error)):
            each.join()


def test_a_rank_that_comes_late_is_waited_for(ranks: Ranks) -> None:
    done = ranks.run(JOINING, {"1": {"late": "0.6"}}, 0.2, nproc=2)
    assert [each["ranks"] for each in done.check()] == [[0, 1], [0, 1]]
    assert "1 of 2 ranks has not joined" in done.logs[0]


def test_nodes_on_one_machine_join_over_loopback(ranks: Ranks) -> None:
    """As with two agents of torchrun, or two containers, on one machine."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = ranks.run(JOINING, {str(rank): {**alone, "GROUP_RANK": str(rank)} for rank in range(2)}, nproc=2).check()
    assert [each["ranks"] for each in found] == [[0, 1], [0, 1]]


def test_a_rank_of_another_run_does_not_join() -> None:
    """Two runs share a port, as two steps of one Slurm job did."""
    store = dist.HashStore()
    first, second = (meeting(store, rank, run=f"slurm-7.{rank}") for rank in range(2))
    first._check_run()
    error = error_of(second.join)
    assert "is another run's (slurm-7.0, 2 ranks; this one is slurm-7.1, 2 ranks)" in error
    assert "set MASTER_PORT to another free port" in error
    assert "1 of 2 ranks has not joined" in error_of(first.join)


def test_two_processes_do_not_join_as_the_same_rank() -> None:
    store = dist.HashStore()
    first, second, third = (meeting(store, rank) for rank in (0, 1, 1))
    second._say_hello()
    first._check_run()
    assert f"on {HOST} has already joined as rank 1 at 127.0.0.1:" in error_of(third.join)


@pytest.mark.parametrize("theirs", ["", "guessed"])
def test_who_does_not_know_the_secret_does_not_join(ranks: Ranks, theirs: str) -> None:
    changes = {"0": {SECRET: "of the run", JOIN_TIMEOUT: "2"}, "1": {SECRET: theirs, JOIN_TIMEOUT: "4"}}
    first, second = ranks.run(JOINING, changes, nproc=2).check()
    assert "1 of 2 ranks has not joined" in first["error"]
    assert second["kind"] in ("LaunchError", "PeerFailed")


@pytest.mark.parametrize("secret", ["", "of the run"])
def test_a_stranger_in_the_store_runs_nothing(ranks: Ranks, tmp_path: Path, secret: str) -> None:
    canary = tmp_path / "ran"
    found, written = ranks.run(
        "tests.support.joining_programs:invaded", str(canary), nproc=2, environment={SECRET: secret}
    ).check()
    assert written
    assert found["kind"] == "LaunchError"
    # What the stranger wrote first decides which of these it is, where it does not know the names of the keys.
    told = ("ranks have not joined", "is another run's") if secret else ("not of a rank of this run",)
    assert any(each in found["error"] for each in told)
    assert not canary.exists()


@pytest.mark.parametrize("secret", ["", "of the run"])
def test_what_a_stranger_answers_as_a_rank_does_not_run(ranks: Ranks, tmp_path: Path, secret: str) -> None:
    program, canary = "tests.support.joining_programs:answering", tmp_path / "ran"
    found = ranks.run(program, str(canary), nproc=2, environment={SECRET: secret}).check()
    assert "a message is not of a rank of this run" in found[0]
    assert not canary.exists()


def test_ranks_with_one_secret_join(ranks: Ranks) -> None:
    found = ranks.run(JOINING, {}, nproc=2, environment={SECRET: "of the run"}).check()
    assert [each["ranks"] for each in found] == [[0, 1], [0, 1]]


def test_ranks_of_a_supervisor_listen_on_this_machine_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Also where the machine's name leads to an address that others reach."""
    supervised = {REPORTS: str(tmp_path)}
    found = ranks.run("tests.support.joining_programs:listening", nproc=2, environment=supervised).check()
    for addresses in found:
        assert addresses
        assert all(is_loopback(address) for address in addresses), addresses


def test_a_port_of_another_process_is_named(ranks: Ranks) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        (found,) = ranks.run(JOINING, {}, environment=one_of_two(0, other.getsockname()[1])).check()
    assert f"rank 0 on {HOST}: port {other_port(found)} is in use by another process" in found["error"]
    assert "set MASTER_PORT to a free port" in found["error"]


def other_port(found: dict[str, str]) -> str:
    return found["error"].split("port ")[1].split()[0]


@pytest.fixture
def agent() -> Iterator[int]:
    """The port of a store that outlives the ranks, as torchrun's agent serves it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield store.port
    del store


def test_ranks_that_start_again_do_not_take_what_earlier_ones_left(ranks: Ranks, agent: int) -> None:
    """A node that joins makes torchrun's agent start the ranks again, which it does not count as a restart."""
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agent), JOIN_TIMEOUT: "20"}
    for nproc in (2, 3, 2, 2):
        found = ranks.run(JOINING, {"1": {"late": "0.3"}}, nproc=nproc, environment=environment).check()
        assert [each["ranks"] for each in found] == [list(range(nproc))] * nproc


def test_a_job_that_is_suspended_while_it_starts_goes_on() -> None:
    process = os.fork()
    if not process:
        clock = JoinClock(2.0)
        time.sleep(2.0)
        os._exit(int(clock.left < 0))
    time.sleep(0.3)
    os.kill(process, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process, signal.SIGCONT)
    assert os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize(("text", "seconds"), [(None, 600.0), ("90", 90.0)])
def test_the_limit_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    monkeypatch.delenv(JOIN_TIMEOUT, raising=False)
    if text is not None:
        monkeypatch.setenv(JOIN_TIMEOUT, text)
    assert join_timeout() == seconds
    assert join_timeout(5.0) == 5.0


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(JOIN_TIMEOUT, text)
    with pytest.raises(UsageError, match=f"{JOIN_TIMEOUT}: should be a number of seconds above 0, and is "):
        join_timeout()


def test_interfaces_are_found_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert [is_loopback(address) for address in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1")] == [1, 1, 1, 0]


NODE_SCRIPT = """
import os
from stepmark.errors import LaunchError
from stepmark.runtime.context import start
try:
    print("together", start("cpu").host.all_gather(os.uname().nodename), os.environ.get("GLOO_SOCKET_IFNAME"))
except LaunchError as error:
    print("error:", error)
"""


def on_two_nodes(tmp_path: Path, hosts: dict[str, str], seconds: str) -> list[str]:
    """What a rank on each of two machines with these /etc/hosts prints."""
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    with two_nodes(tmp_path, hosts) as nodes:
        started = []
        for rank, node in enumerate(nodes):
            environment = {**kept, **one_of_two(rank, 29400, seconds), "MASTER_ADDR": "node-a", "GROUP_RANK": str(rank)}
            environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            started.append(node.start([sys.executable, "-c", NODE_SCRIPT], environment, tmp_path))
        return [process.communicate(timeout=120)[0] for process in started]


def debian(own: str, other: str, address: str) -> str:
    """Debian's /etc/hosts, where a machine's own name is 127.0.1.1."""
    return f"127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}\n"


@pytest.mark.prove
@pytest.mark.skipif(not available(), reason="needs the right to make network namespaces")
def test_machines_whose_own_name_is_a_loopback_address_connect(tmp_path: Path) -> None:
    hosts = {"node-a": debian("node-a", "node-b", "10.77.0.2"), "node-b": debian("node-b", "node-a", "10.77.0.1")}
    for told in on_two_nodes(tmp_path, hosts, "60"):
        assert f"together ['node-a', 'node-b'] {INTERFACE}" in told


@pytest.mark.prove
@pytest.mark.skipif(not available(), reason="needs the right to make network namespaces")
def test_a_master_address_that_is_another_machine_for_each_is_named(tmp_path: Path) -> None:
    hosts = {"node-a": debian("node-a", "node-b", "10.77.0.2"), "node-b": debian("node-b", "node-a", "127.0.1.1")}
    first, second = on_two_nodes(tmp_path, hosts, "4")
    assert "error: rank 0 on node-a: after 4 s (join_timeout) 1 of 2 ranks has not joined" in first
    assert "rank 1 (node 1)" in first
    assert "error: rank 1 on node-b cannot reach rank 0 at node-a:29400 (127.0.1.1)" in second
    assert "the name node-a means this machine itself here, on node 1, since it resolves to 127.0.1.1" in second
