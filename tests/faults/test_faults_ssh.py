"""A real sshd on this machine; sessions are killed and stopped while a console reads a fleet through them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.ports import free_port
from vllm_console.fleet import remote_hosts
from vllm_console.fleet.remote_hosts import RemoteHost, RemoteHosts, write_hosts
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import State

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
SECONDS = 90.0


@dataclass(frozen=True)
class Sshd:
    """A listening sshd and the program behind it."""

    process: subprocess.Popen[bytes]
    command: str

    def sessions(self) -> set[int]:
        """The process of each connection."""
        return set(_children(self.process.pid))


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(one for child in _children(pid) for one in _family(child))]


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """An sshd for this user on loopback, and an ``ssh`` on ``PATH`` configured for it."""
    ssh, keygen = shutil.which("ssh"), shutil.which("ssh-keygen")
    if SSHD is None or ssh is None or keygen is None:
        pytest.skip("no OpenSSH here")
    folder, port, user = tmp_path / "ssh", free_port(), tmp_path / "ssh" / "user"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {user}.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    (folder / "config").write_text(
        f"Host box-*\n HostName 127.0.0.1\n Port {port}\n IdentityFile {user}\n UserKnownHostsFile {folder}/known\n"
    )
    checked = subprocess.run([SSHD, "-t", "-f", folder / "sshd"], capture_output=True, text=True, check=False)
    if checked.returncode:
        pytest.skip(f"no sshd can be started here: {checked.stderr.strip()}")
    there = [f"export XDG_{name}_HOME={tmp_path}/there/{name}" for name in ("STATE", "CONFIG", "CACHE", "DATA")]
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ssh", f'exec {ssh} -F {folder}/config "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    command = script(tmp_path / "vllm-console", *there, f'exec {sys.executable} -m vllm_console "$@"')
    with (tmp_path / "sshd.log").open("wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd"], stdin=subprocess.DEVNULL, stderr=log)
    try:
        yield Sshd(process, command)
    finally:
        for pid in _family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def hosts(sshd: Sshd, tmp_path: Path) -> Iterator[RemoteHosts]:
    """Two machines behind it, attached and read: ``box-a`` and ``box-b``."""
    write_hosts(tmp_path / "state", [RemoteHost(name, name, None, sshd.command) for name in ("box-a", "box-b")])
    found = RemoteHosts(tmp_path / "state", patience=0.0)
    until(lambda: not lost(found, "box-a") and not lost(found, "box-b") and len(sshd.sessions()) == 2, "no connection")
    yield found
    found.close()


def lost(hosts: RemoteHosts, name: str) -> bool:
    """Whether a machine is unreachable or has not responded yet."""
    rows = [view for view in hosts.views(None)[0] if view.name == name]
    return any(view.state in (State.UNRESPONSIVE, State.STARTING) for view in rows)


def reason(hosts: RemoteHosts, name: str) -> str:
    return next((view.reason for view in hosts.views(None)[0] if view.name == name), "")


def session_of(sshd: Sshd, hosts: RemoteHosts, name: str) -> int:
    """The sshd process of a machine's connection; ending it ends no other connection."""
    connection = hosts.connection(name)._session
    assert connection is not None
    ssh = connection._process.pid
    sockets = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    (own,) = (line.split()[3] for line in sockets if f"pid={ssh}," in line)
    return next(pid for line in sockets for pid in sshd.sessions() if line.split()[4] == own and f"pid={pid}," in line)


@pytest.mark.skipif(shutil.which("ss") is None, reason="no ss here")
def test_killed_ssh_session_affects_one_row_and_reconnects(sshd: Sshd, hosts: RemoteHosts) -> None:
    session, other = session_of(sshd, hosts, "box-a"), session_of(sshd, hosts, "box-b")
    there = _family(session)
    os.kill(session, signal.SIGKILL)
    until(lambda: lost(hosts, "box-a"), "it was not noticed")
    assert "closed" in reason(hosts, "box-a")
    until(lambda: not lost(hosts, "box-a"), "it did not come back")
    until(lambda: not any(map(_alive, there)), "what it ran there did not end")
    assert session_of(sshd, hosts, "box-b") == other, "the other connection was kept"


@pytest.mark.skipif(shutil.which("ss") is None, reason="no ss here")
def test_hanging_ssh_session_is_replaced(sshd: Sshd, hosts: RemoteHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_hosts, "ANSWER_SECONDS", 3.0)  # from the next request on
    session, other = session_of(sshd, hosts, "box-a"), session_of(sshd, hosts, "box-b")
    there = _family(session)
    os.kill(session, signal.SIGSTOP)
    with pytest.raises(OperationError, match="it is unknown whether it was done"):
        hosts.connection("box-a").do("stop", "chat")
    until(lambda: "no answer within" in reason(hosts, "box-a"), "it was not given up")
    assert not lost(hosts, "box-b")
    until(lambda: not lost(hosts, "box-a"), "it did not come back")
    assert session_of(sshd, hosts, "box-b") == other, "the other connection was kept"
    os.kill(session, signal.SIGCONT)
    until(lambda: not any(map(_alive, there)), "what it ran there did not end")
