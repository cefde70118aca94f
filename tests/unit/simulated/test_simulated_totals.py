"""An engine that continues a recording starts with its totals."""

from __future__ import annotations

from vllm_console.metrics.parse import Parser
from vllm_launchers.engine_model.core import StepReport
from vllm_launchers.engine_model.scheduler import Batch
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.settings import Simulated, resolve_settings


def test_totals_are_summed_and_gauges_are_not() -> None:
    settings = resolve_settings(parse_flags(["serve", "Qwen/Qwen3-8B-AWQ"]), Simulated.from_environment({}))
    plan = plan_memory(settings)

    def counted(metrics: Metrics) -> bytes:
        metrics.engines[0].step(StepReport(0.1, Batch(preempted=2), ttfts=[0.3], itls=[0.02, 0.02]))
        return metrics.render()

    before = Metrics(settings, plan)
    before.engines[0]._gauges["num_requests_running"].set(7)
    body = counted(before)
    after = counted(Metrics(settings, plan, totals=body.decode()))
    one, other = (Parser().parse(text.decode(), 0.0).engines["0"] for text in (body, after))
    assert (one.preemptions_total, other.preemptions_total) == (2, 4)
    assert (one.requests_running, other.requests_running) == (7, 0)
    for key, count in (("ttft", 2), ("itl", 4)):
        assert other.histograms[key].count == count
        assert other.histograms[key].sum == 2 * one.histograms[key].sum
