"""requests: a server's finished requests, from its probe's records. The JSON is a contract."""

from __future__ import annotations

import stat
import time

from fakes.commands import ASK_SECONDS, PATIENCE

KEYS = [
    "id", "arrived_at", "finished_at", "prompt_tokens", "output_tokens", "cached_tokens", "queue_seconds",
    "prefill_seconds", "decode_seconds", "ttft_seconds", "e2e_seconds", "preemptions", "finish_reason",
]  # fmt: skip


def start(program, *words, name="chat"):
    return program.json("start", "chatbot", "--engine", "simulated", "--name", name, "--wait", *words)


def recorded(program, count, *words):
    """The requests, once ``count`` of them are on disk. The probe writes four times per second."""
    deadline = time.monotonic() + PATIENCE
    while len(found := program.json("requests", "chat", *words)) < count:
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)
    return found


def send(program, count):
    return program.json("load", "chat", "--requests", str(count), "--rate", "20")


def test_requests_have_tokens_and_times(program):
    began = time.time()
    start(program, "--env", "SIMULATED_SPEED=20")
    report = send(program, 5)
    found = recorded(program, 5)
    assert len(found) == 5, "the keeper's warm-up request is not included"
    assert {tuple(one) for one in found} == {tuple(KEYS)}
    assert sum(one["output_tokens"] for one in found) == report["output_tokens"]
    for one in found:
        assert one["id"].startswith("cmpl-")
        assert began < one["arrived_at"] < time.time()
        assert one["prompt_tokens"] > 0
        assert one["preemptions"] == 0
        assert one["finish_reason"] in ("stop", "length")
        parts = one["queue_seconds"] + one["prefill_seconds"] + one["decode_seconds"]
        assert abs(parts - one["e2e_seconds"]) < 0.05
        assert 0 < one["ttft_seconds"] <= one["e2e_seconds"]
    ends = [one["finished_at"] for one in found]
    assert all(abs(one["arrived_at"] + one["e2e_seconds"] - one["finished_at"]) < 0.05 for one in found)
    assert ends == sorted(ends, reverse=True), "newest first"
    assert program.json("requests", "chat", "--last", "2") == found[:2]
    slowest = [one["e2e_seconds"] for one in program.json("requests", "chat", "--slowest")]
    assert slowest == sorted(slowest, reverse=True)

    text = program("requests", "chat", "--last", "3").stdout
    assert text.startswith("5 finished requests recorded since ")
    assert "exact quantiles" in text
    assert [row.split()[0] for row in text.splitlines()[3:8]] == ["queue", "prefill", "decode", "TTFT", "e2e"]
    assert "the 3 newest; --last N shows more" in text


def test_steps_and_prefix_cache_use(program):
    start(program, "--env", "SIMULATED_SPEED=20")
    program.json("load", "chat", "--requests", "6", "--rate", "20", "--input-tokens", "600", "--prefix-reuse", "0.8")
    found = recorded(program, 6)
    steps = program.json("requests", "chat", "--steps")
    assert steps == sorted(steps, key=lambda one: -one["at"])
    assert sum(one["generation_tokens"] for one in steps) == sum(one["output_tokens"] for one in found)
    assert sum(one["prefix_cache_hits"] for one in steps) == sum(one["cached_tokens"] for one in found)
    assert program.json("requests", "chat", "--steps", "--last", "2") == steps[:2]
    text = program("requests", "chat", "--steps", "--last", "3").stdout
    assert "STEP TIME" in text
    assert "the 3 newest; --last N shows more" in text

    use = program.json("requests", "chat", "--prefixes")
    assert use["requests"] == 6
    assert use["cached_tokens"] == sum(one["cached_tokens"] for one in found) > 0
    (lengths,) = use["by_prompt_tokens"]
    assert (lengths["from"], lengths["to"], lengths["requests"]) == (512, 1023, 6)
    assert use["resumed"] is None
    assert "512-1,023" in program("requests", "chat", "--prefixes").stdout
    assert program("requests", "chat", "--prefixes", "--last", "3").returncode == 2
    assert program("requests", "chat", "--prefixes", "--steps").returncode == 2


def test_requests_by_run_and_by_time_across_runs(program):
    start(program, "--env", "SIMULATED_SPEED=20")
    began = time.localtime(time.time() - 60)
    send(program, 3)
    recorded(program, 3)
    program.json("restart", "chat", "--wait")
    assert program.json("requests", "chat") == []
    assert "No finished request of chat is recorded yet." in program("requests", "chat").stdout
    send(program, 2)
    recorded(program, 2)
    since = time.strftime("%Y-%m-%d %H:%M:%S", began)
    assert len([one for one in recorded(program, 5, "--since", since) if one["output_tokens"] > 2]) == 5
    folder = program.home / "state/vllm-console/servers/chat/probe"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.glob("requests-*"))) == 2, "each process writes its own files"


def test_missing_probe_is_explained(program):
    start(program, "--no-probe")
    answer = program("requests", "chat")
    assert answer.returncode == 1
    assert answer.stderr == (
        "vllm-console: chat has no probe, so its requests are not recorded: --no-probe was given; "
        "'vllm-console restart chat --probe' adds it\n"
    )
    program.json("restart", "chat", "--wait")
    assert "--no-probe was given" in program("requests", "chat").stderr, "it stays disabled after a restart"
    program.json("restart", "chat", "--probe", "--set", "disable-log-stats=true", "--wait")
    assert program("requests", "chat").stderr.endswith("--disable-log-stats turns vLLM's statistics off\n")
    program.json("restart", "chat", "--unset", "disable-log-stats", "--wait")
    assert program.json("requests", "chat") == []


def test_unknown_server_and_time(program):
    assert program("requests", "nobody").stderr == (
        "vllm-console: no server is called 'nobody'; see 'vllm-console list'\n"
    )
    answer = program("requests", "nobody", "--since", "tomorrow")
    assert answer.returncode == 2
    assert "--since tomorrow" in answer.stderr


def test_setting_disables_probe_and_plan_reports_it(program):
    plan = program.json("plan", "chatbot", "--engine", "simulated", env={"PYTHONPATH": "/mine"})
    assert plan["probe"] == {"added": True, "why_not": None}
    assert plan["env"]["PYTHONPATH"].endswith(":/mine")
    folder = program.home / "config" / "vllm-console"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('probe = "off"\n')
    plan = program.json("plan", "chatbot", "--engine", "simulated")
    assert plan["probe"] == {"added": False, "why_not": 'the settings have probe = "off"'}
    assert "PYTHONPATH" not in plan["env"]
    assert program.json("plan", "chatbot", "--engine", "simulated", "--probe")["probe"]["added"]
