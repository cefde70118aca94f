"""In virtual time, each flag changes the displayed values in the same direction as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_launchers.simulated.vocabulary import output_text, output_token, tokenize

Lab = Callable[..., Any]


def test_fewer_sequences_mean_fewer_preemptions(lab: Lab, traffic: Lab) -> None:
    line = "--max-model-len 4096 --num-gpu-blocks-override 1000 --max-num-seqs {}"
    many = lab(line.format(64)).run(traffic(80, rate=8, prompt=400, output=400))
    few = lab(line.format(16)).run(traffic(80, rate=8, prompt=400, output=400))
    assert many.preemptions > 10
    assert few.preemptions < many.preemptions / 3
    assert len(many.finished) == len(few.finished) == 80


def test_prefix_caching_lowers_ttft_of_shared_prompts(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    work = {"rate": 3, "prompt": 2000, "output": 50, "shared": 1800}
    on = lab("--max-model-len 4096 --enable-prefix-caching").run(traffic(60, **work))
    off = lab("--max-model-len 4096 --no-enable-prefix-caching").run(traffic(60, **work))
    assert on.cache_hits / on.cache_queries > 0.8
    assert off.cache_hits == 0
    assert quantile(on.ttfts, 0.5) < quantile(off.ttfts, 0.5) / 2


def test_prefix_caching_finds_nothing_in_unique_prompts(lab: Lab, traffic: Lab) -> None:
    done = lab("--max-model-len 4096").run(traffic(20, rate=3, prompt=500, output=10))
    assert done.cache_queries == 20 * 500
    assert done.cache_hits == 0


def test_fp8_cache_holds_twice_the_tokens(lab: Lab) -> None:
    plain = lab("--max-model-len 4096").plan
    halved = lab("--max-model-len 4096 --kv-cache-dtype fp8").plan
    assert halved.tokens / plain.tokens == pytest.approx(2, rel=0.01)
    assert lab("--max-model-len 4096 --kv-cache-dtype fp8_e5m2").plan.tokens == halved.tokens
    assert lab("--max-model-len 4096 --kv-cache-dtype bfloat16").plan.tokens == plain.tokens


def test_fp8_cache_preempts_less(lab: Lab, traffic: Lab) -> None:
    line = "--max-model-len 4096 --kv-cache-memory-bytes 1500000000"
    work = {"rate": 4, "prompt": 400, "output": 300}
    plain = lab(line).run(traffic(60, **work))
    halved = lab(f"{line} --kv-cache-dtype fp8").run(traffic(60, **work))
    assert plain.preemptions > 5
    assert halved.preemptions < plain.preemptions / 2


def test_without_chunked_prefill_long_prompts_stall_the_others(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    def mixed() -> list[Any]:
        talkers = traffic(8, rate=100, prompt=50, output=400, seed=1)
        readers = traffic(3, rate=0.4, prompt=15_000, output=5, seed=2)
        for reader in readers:
            reader.id = f"long-{reader.id}"
        return [*talkers, *readers]

    line = "--max-model-len 16384 --max-num-seqs 32"
    chunked = lab(f"{line} --enable-chunked-prefill").run(mixed())
    whole = lab(f"{line} --no-enable-chunked-prefill").run(mixed())
    assert max(whole.itls) > 3 * max(chunked.itls)
    assert quantile(whole.itls, 0.5) < max(whole.itls) / 20, "it is a spike, not a slower pace"


def test_larger_steps_speed_up_long_prompts_and_delay_others(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    work = {"rate": 0.4, "prompt": 6000, "output": 200}
    line = "--max-model-len 8192 --max-num-seqs 64 --max-num-batched-tokens {}"
    large = lab(line.format(8192)).run(traffic(20, **work))
    small = lab(line.format(256)).run(traffic(20, **work))
    assert quantile(large.ttfts, 0.5) < quantile(small.ttfts, 0.5)
    assert quantile(large.itls, 0.99) > 2 * quantile(small.itls, 0.99)


def test_utilization_increases_tokens(lab: Lab) -> None:
    sizes = [lab(f"--max-model-len 4096 --gpu-memory-utilization {share}").plan.tokens for share in (0.5, 0.7, 0.9)]
    assert sizes == sorted(sizes)
    assert sizes[2] > 2 * sizes[0]


def test_pool_size_is_set_in_bytes_or_blocks(lab: Lab) -> None:
    by_bytes = lab("--max-model-len 4096 --kv-cache-memory-bytes 2G --gpu-memory-utilization 0.5").plan
    assert by_bytes.available == 2 * 2**30
    assert by_bytes.blocks == 2 * 2**30 // by_bytes.block_bytes
    assert lab("--max-model-len 4096 --num-gpu-blocks-override 300").plan.blocks == 300


def test_block_size_changes_blocks_not_tokens(lab: Lab) -> None:
    small, large = (lab(f"--max-model-len 4096 --block-size {size}").plan for size in (16, 64))
    assert large.blocks == pytest.approx(small.blocks / 4, rel=0.01)
    assert large.tokens == pytest.approx(small.tokens, rel=0.01)


def test_larger_blocks_cache_less_of_a_prefix(lab: Lab, traffic: Lab) -> None:
    work = {"rate": 2, "prompt": 300, "output": 5, "shared": 100}
    fine = lab("--max-model-len 4096 --block-size 16").run(traffic(10, **work))
    coarse = lab("--max-model-len 4096 --block-size 64").run(traffic(10, **work))
    assert fine.cache_hits == 9 * 96
    assert coarse.cache_hits == 9 * 64


def test_shorter_context_allows_more_concurrent_requests(lab: Lab) -> None:
    short, long = (lab(f"--max-model-len {length}").plan for length in (4096, 32768))
    assert short.concurrency == pytest.approx(8 * long.concurrency, rel=0.01)


def test_tensor_parallelism_shortens_iterations_and_grows_the_pool(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    work = {"rate": 2, "prompt": 500, "output": 100}
    one = lab("--max-model-len 4096", model="Qwen/Qwen3-8B")
    two = lab("--max-model-len 4096 -tp 2", model="Qwen/Qwen3-8B")
    assert two.plan.tokens > 2 * one.plan.tokens
    single, double = one.run(traffic(20, **work)), two.run(traffic(20, **work))
    assert 0.5 < quantile(double.itls, 0.5) / quantile(single.itls, 0.5) < 0.75


def test_pipeline_parallelism_grows_the_pool_but_not_the_pace(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    one, two = lab("--max-model-len 4096"), lab("--max-model-len 4096 -pp 2")
    assert two.plan.tokens > 1.9 * one.plan.tokens
    single, double = (built.run(traffic(5, rate=1, prompt=100, output=50)) for built in (one, two))
    assert quantile(double.itls, 0.5) >= quantile(single.itls, 0.5)


def test_eager_mode_is_slower_and_leaves_more_memory(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    graphs, eager = lab("--max-model-len 4096"), lab("--max-model-len 4096 --enforce-eager")
    assert eager.plan.tokens > graphs.plan.tokens
    with_graphs, without = (built.run(traffic(5, rate=1, prompt=100, output=50)) for built in (graphs, eager))
    assert quantile(without.itls, 0.5) > 1.1 * quantile(with_graphs.itls, 0.5)


def test_quantized_checkpoint_decodes_faster(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    bits16 = lab("--max-model-len 4096", model="Qwen/Qwen3-8B").run(traffic(5, rate=1, prompt=100, output=50))
    bits4 = lab("--max-model-len 4096").run(traffic(5, rate=1, prompt=100, output=50))
    assert quantile(bits4.itls, 0.5) < quantile(bits16.itls, 0.5) / 2


def test_faster_gpu_is_faster(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    slow, fast = (
        lab("--max-model-len 4096", SIMULATED_GPU=gpu).run(traffic(10, rate=2, prompt=1000, output=50))
        for gpu in ("RTX A6000", "H100 80GB")
    )
    assert quantile(fast.ttfts, 0.5) < quantile(slow.ttfts, 0.5) / 3
    assert quantile(fast.itls, 0.5) < quantile(slow.itls, 0.5) / 2


def test_throughput_saturates_with_batch_size_while_latency_grows(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    rates, latencies = [], []
    for seqs in (1, 16, 64, 256):
        built = lab(f"--max-model-len 4096 --max-num-seqs {seqs}")
        done = built.run(traffic(seqs * 2, rate=10_000, prompt=16, output=100))
        rates.append(done.generated / done.seconds)
        latencies.append(quantile(done.itls, 0.5))
    assert rates == sorted(rates)
    assert latencies == sorted(latencies)
    assert rates[3] / rates[2] < rates[1] / rates[0]


def test_generated_text_tokenizes_to_its_tokens() -> None:
    text = output_text(99, 0, 200)
    assert tokenize(text) == [output_token(99, position) for position in range(200)]
    assert output_text(99, 0, 50) + output_text(99, 50, 200) == text


def test_english_has_about_four_characters_a_token() -> None:
    text = "The keeper holds one server, writes its log, and restarts it when the policy says so. " * 5
    assert 3 < len(text) / len(tokenize(text)) < 6


def test_pipeline_stages_work_on_different_iterations(lab: Lab, traffic: Lab, quantile: Lab) -> None:
    line = "--max-model-len 4096 --max-num-batched-tokens 512 {}"
    work = {"rate": 1000, "prompt": 500, "output": 40}
    one, two, four = (
        lab(line.format(flags), model="Qwen/Qwen3-32B-AWQ").run(traffic(40, **work)) for flags in ("", "-pp 2", "-pp 4")
    )
    assert one.generated == two.generated == four.generated == 40 * 40
    assert 1.4 < one.seconds / two.seconds < 2
    assert one.seconds / four.seconds > 2
    # A single request has nothing to overlap with: its tokens pass through all stages in sequence.
    alone = [lab(line.format(flags), model="Qwen/Qwen3-32B-AWQ").run(traffic(1, **work)) for flags in ("", "-pp 4")]
    assert quantile(alone[1].itls, 0.5) >= quantile(alone[0].itls, 0.5)


def test_pipeline_under_pressure_loses_no_token_or_block(lab: Lab, traffic: Lab) -> None:
    built = lab("--max-model-len 1024 --num-gpu-blocks-override 120 --max-num-batched-tokens 256 -pp 3")
    done = built.run(traffic(40, rate=50, prompt=150, output=120))
    assert done.preemptions > 5
    assert [request.generated for request in done.finished] == [120] * 40
    assert all(request.under_way == 0 for request in done.finished)
    assert built.core.scheduler.pool.used == 0
