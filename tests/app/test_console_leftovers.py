"""Leftovers of ended servers: shown with a question, removed after a yes, and never in read-only mode."""

from __future__ import annotations

from vllm_console.fleet.leftovers import Leftovers
from vllm_launchers.host.shared_memory import LeftFile
from vllm_launchers.keeper.orphans import Orphan
from vllm_launchers.keeper.records import ProcessIdentity

LEFT = Leftovers(
    (Orphan(ProcessIdentity(4711, 5, "boot"), "VLLM::EngineCor", "/state/servers/chat", "its server is failed"),),
    (LeftFile("/dev/shm/psm_0a1b2c3d", 240 << 20, 7, "seen"),),
)


async def test_leftovers_are_named_and_go_after_a_yes(console):
    async with console() as c:
        c.fleet.left = LEFT
        await c.press("X")
        await c.sees("End and remove 1 process and 1 file (240 MiB) in /dev/shm?")
        await c.sees("pid 4711 VLLM::EngineCor: of server chat; its server is failed")
        await c.sees("psm_0a1b2c3d (240 MiB)")
        await c.press("n")
        assert [call[0] for call in c.fleet.calls] == ["leftovers"]
        await c.press("X")
        await c.sees("End and remove")
        await c.press("y")
        await c.sees("Removed 1 process and 1 file (240 MiB) in /dev/shm.")
        assert c.fleet.calls[-1] == ("remove_leftovers", LEFT)


async def test_where_no_process_is_left_none_is_reported_as_ended(console):
    async with console() as c:
        c.fleet.left = Leftovers((), LEFT.files)
        await c.press("X")
        await c.sees("  Remove 1 file (240 MiB) in /dev/shm?")


async def test_nothing_left_is_reported(console):
    async with console() as c:
        await c.press("X")
        await c.sees("No leftovers of ended servers.")
        assert [call[0] for call in c.fleet.calls] == ["leftovers"]


async def test_a_read_only_console_has_no_such_key(console):
    async with console(read_only=True) as c:
        c.fleet.left = LEFT
        await c.press("X")
        await c.pilot.pause()
        assert c.fleet.calls == []


async def test_a_reason_stands_once_above_the_files_that_it_holds_for(console):
    def files(numbers, why):
        return tuple(LeftFile(f"/dev/shm/psm_{number}", 1 << 20, number, why) for number in numbers)

    async with console() as c:
        c.fleet.left = Leftovers((), files(range(3), "its server has ended") + files(range(3, 12), "nothing uses it"))
        await c.press("X")
        await c.sees("3 files in /dev/shm: its server has ended; no process has them open")
        await c.sees("9 files in /dev/shm: nothing uses it; no process has them open")
        await c.until(lambda: c.text.count("no process has") == 2, "two reasons")
        await c.sees("psm_7 (1 MiB)")
        await c.lacks("psm_8")
        await c.sees("and 4 more: vllm-console leftovers")


async def test_a_demo_removes_nothing_of_others(console):
    async with console(demo=True) as c:
        c.fleet.left = LEFT
        await c.press("X")
        await c.sees("This is the demo: 'vllm-console leftovers' lists")
        assert c.fleet.calls == []
