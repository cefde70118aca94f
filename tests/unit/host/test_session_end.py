"""Which processes end at logout, with fake folders for /etc, /proc and /var."""

from __future__ import annotations

import os
import pwd

import pytest

from vllm_launchers.host.session_end import Logind, ending, logind_settings, session_end

IN_A_SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
BELOW_A_MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope\n"
SYSTEM = "0::/system.slice/ssh.service\n"
MAIN = "/etc/systemd/logind.conf"


@pytest.mark.parametrize(
    ("main", "more", "kills"),
    [
        ("", [], False),
        ("[Login]\n#KillUserProcesses=no\n", [], False),
        ("[Login]\n#KillUserProcesses=yes\n", [], True),
        ("[Login]\nKillUserProcesses = Yes \n", [], True),
        ("[Login]\nKillUserProcesses=no\n#KillUserProcesses=yes\n", [], False),
        ("[Login]\nKillUserProcesses=yes\n", [("/d/10.conf", "[Login]\nKillUserProcesses=0\n")], False),
        ("", [("/d/10.conf", "KillUserProcesses=no"), ("/d/20.conf", "KillUserProcesses=on")], True),
        ("", [("/d/10.conf", "#KillUserProcesses=yes")], False),
    ],
)
def test_logind_settings_are_merged(main, more, kills):
    assert logind_settings((MAIN, main), more).kills is kills


def test_users_whose_processes_are_killed():
    text = "KillUserProcesses=yes\nKillOnlyUsers=anna bert\nKillExcludeUsers=bert\n"
    found = logind_settings((MAIN, text), [])
    assert [found.kills_those_of(user) for user in ("anna", "bert", "carl", "root")] == [True, False, False, False]
    assert not Logind(kills=True).kills_those_of("root"), "as logind's own default is"


@pytest.mark.parametrize("lingers", [False, True])
def test_session_that_kills_its_processes_is_reported(lingers):
    found = ending(IN_A_SESSION, "anna", Logind(kills=True, file=MAIN), lingers=lingers)
    assert f"KillUserProcesses=yes in {MAIN}" in found.sentence
    assert "systemd-run --user --scope vllm-console" in found.sentence
    assert ("enable-linger" in found.sentence) is not lingers
    assert "\n" not in found.sentence


def test_under_the_user_manager_only_lingering_matters():
    assert "enable-linger" in ending(BELOW_A_MANAGER, "anna", Logind(), lingers=False).sentence
    assert ending(BELOW_A_MANAGER, "anna", Logind(kills=True), lingers=True) is None


@pytest.mark.parametrize("cgroup", [SYSTEM, "", "0::/\n", "0::/kubepods/pod1/x\n"])
def test_elsewhere_processes_are_not_killed(cgroup):
    assert ending(cgroup, "anna", Logind(kills=True, file=MAIN), lingers=False) is None
    assert ending(IN_A_SESSION, "anna", Logind(kills=False), lingers=False) is None


def test_session_end_is_read_from_the_machines_files(tmp_path):
    def put(path: str, text: str = "") -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    user = pwd.getpwuid(os.getuid()).pw_name
    only = f"KillExcludeUsers=nobody\nKillOnlyUsers={user}\n" if user != "root" else "KillUserProcesses=yes\n"
    assert session_end(root=tmp_path) == "", "no such machine"
    put("proc/self/cgroup", IN_A_SESSION)
    put("proc/7/cgroup", SYSTEM)
    put("usr/lib/systemd/logind.conf", f"[Login]\nKillUserProcesses=yes\n{only}")
    if user == "root":  # logind does not end root's processes
        assert session_end(root=tmp_path) == ""
    else:
        assert "/usr/lib/systemd/logind.conf" in session_end(root=tmp_path)
    assert session_end(7, root=tmp_path) == ""
    put("etc/systemd/logind.conf.d/50-local.conf", "KillUserProcesses=no")
    assert session_end(root=tmp_path) == ""
    put("proc/self/cgroup", BELOW_A_MANAGER)
    assert "service manager" in session_end(root=tmp_path)
    put(f"var/lib/systemd/linger/{user}")
    assert session_end(root=tmp_path) == ""
