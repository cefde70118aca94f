"""Claims about batching, preemption, chunked prefill and prefix caching: traffic on a simulated engine."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from guides.claim import Claim, Outcome, Source, Verdict, close, gained, rising
from guides.memory import APART, LLAMA_70B, MISTRAL, SMALL
from guides.serving import Served, Server, Traffic, arrivals, closed_loop, open_loop

L40S = Server(MISTRAL, "L40S", {})
BEFORE_V1 = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
"""Defaults of vLLM's V0 engine."""

TIER_CLIENTS, TIER_TRAFFIC = 128, Traffic(2048, 1024)
HALF_SHARED = Traffic(2048, 1024, shared=1024)


@cache
def _tiers() -> tuple[Served, Served, Served, Served]:
    """V0's defaults; with capped context; with chunked prefill and prefix caching as well, without and with shared
    prefixes."""
    capped = L40S.with_flags(max_model_len=3072)
    runs = (
        (L40S.with_flags(**BEFORE_V1), TIER_TRAFFIC),
        (capped.with_flags(**BEFORE_V1), TIER_TRAFFIC),
        (capped, TIER_TRAFFIC),
        (capped, HALF_SHARED),
    )
    first, second, apart, shared = (closed_loop(server, traffic, TIER_CLIENTS, rounds=0.5) for server, traffic in runs)
    return first, second, apart, shared


def tiers() -> Outcome:
    """Sequences and p99 ITL of the three tiers."""
    defaults, capped, apart, shared = _tiers()
    figures = {
        "defaults": defaults.sequences,
        "capped": capped.sequences,
        "apart": apart.sequences,
        "shared": shared.sequences,
        "defaults_itl": 1000 * defaults.itl_p99,
        "capped_itl": 1000 * capped.itl_p99,
        "apart_itl": 1000 * apart.itl_p99,
        "shared_itl": 1000 * shared.itl_p99,
    }
    order = rising(defaults.sequences, capped.sequences, shared.sequences)
    order = order and rising(shared.itl_p99, capped.itl_p99, defaults.itl_p99)
    needs_sharing = close(apart.sequences, capped.sequences, 0.02) and close(apart.itl_p99, capped.itl_p99, 0.05)
    return Outcome(figures, order and not needs_sharing, order)


def tiers_today() -> Outcome:
    """V1's defaults with and without the cap."""
    apart = _tiers()[2]
    defaults = closed_loop(L40S, TIER_TRAFFIC, TIER_CLIENTS, rounds=0.5)
    figures = {"sequences": defaults.sequences, "itl": 1000 * defaults.itl_p99}
    return Outcome(figures, as_claimed=defaults != apart)


def memory_efficiency() -> Outcome:
    """The share of the KV cache that the three tiers use."""
    defaults, capped, _apart, shared = _tiers()
    usage = [100 * served.kv_usage for served in (defaults, capped, shared)]
    figures = dict(zip(("defaults", "capped", "shared"), usage, strict=True))
    return Outcome(figures, as_claimed=rising(*usage), explained=min(usage) > 85)


SEQUENCES = (1, 16, 64, 128, 256, 512, 1024)


def max_num_seqs() -> Outcome:
    """A 70B on 4 A100s with as many clients as max-num-seqs, and how many half-finished requests of 2K + 1K fit."""
    server = Server(LLAMA_70B, "A100-SXM4-80GB", {**APART, "tensor-parallel-size": 4})
    figures: dict[str, float] = {}
    runs = []
    for number in SEQUENCES:
        rounds = 1.0 if number < 1024 else 0.5
        runs.append(closed_loop(server.with_flags(max_num_seqs=number), Traffic(32, 128), number, rounds=rounds))
        figures |= {f"rate_{number}": runs[-1].tokens_per_second, f"itl_{number}": 1000 * runs[-1].itl_p50}
    figures["held"] = server.memory().tokens / (2048 + 1024 / 2)
    latency = rising(*(served.itl_p50 for served in runs))
    rates = [served.tokens_per_second for served in runs]
    level = all(close(rate, rates[4], 0.05) for rate in rates[5:])
    return Outcome(figures, latency and rising(*rates), latency and rising(*rates[:5]) and level, figures["held"] < 256)


CROWD, ANSWERS = 128, Traffic(512, 512)


@cache
def _crowd(**flags: int | str) -> Served:
    """128 clients with 512 tokens in and out on a small GPU."""
    return closed_loop(SMALL.with_flags(**flags), ANSWERS, CROWD, rounds=0.5)


def preemption_symptom() -> Outcome:
    """With preemptions, and with as many sequences as fit."""
    crowded, fitting = _crowd(max_num_seqs=128), _crowd(max_num_seqs=64)
    figures = {
        "crowded": crowded.itl_p99 / crowded.itl_p50,
        "fitting": fitting.itl_p99 / fitting.itl_p50,
        "crowded_rate": crowded.tokens_per_second,
        "fitting_rate": fitting.tokens_per_second,
        "usage": 100 * crowded.kv_usage,
    }
    several = figures["crowded"] > 3 > figures["fitting"]
    return Outcome(figures, several and crowded.tokens_per_second > 0.8 * fitting.tokens_per_second)


def fewer_sequences() -> Outcome:
    many, fitting, few = (_crowd(max_num_seqs=number) for number in (128, 64, 32))
    figures: dict[str, float] = {}
    for name, served in (("many", many), ("fitting", fitting), ("few", few)):
        figures |= {
            f"{name}_preempted": 100 * served.preempted,
            f"{name}_rate": served.tokens_per_second,
            f"{name}_itl": 1000 * served.itl_p99,
        }
    cured = many.preempted > 0 and not fitting.preempted and fitting.itl_p99 < many.itl_p99
    costs = few.tokens_per_second < 0.8 * many.tokens_per_second
    return Outcome(figures, cured and fitting.tokens_per_second > many.tokens_per_second, explained=costs)


def shorter_context() -> Outcome:
    """A tenth of the requests have 12,000 tokens, which a cap of 4,096 refuses; then traffic without long requests."""
    mixed = Traffic(512, 512, every=10, long_prompt=12_000)
    long, capped = (SMALL.with_flags(max_model_len=length) for length in (32768, 4096))
    sent = arrivals(mixed, 1.2, 120)
    all_of_them = open_loop(long, sent)
    taken = [one for one in arrivals(mixed, 1.2, 120) if one.prompt_length + one.output_length <= 4096]
    rest = open_loop(capped, taken)
    figures = {
        "long": 100 * all_of_them.preempted,
        "rest": 100 * rest.preempted,
        "long_itl": 1000 * all_of_them.itl_p99,
        "rest_itl": 1000 * rest.itl_p99,
        "refused": 100 * (1 - len(taken) / len(sent)),
    }
    same = _crowd(max_num_seqs=128, max_model_len=32768) == _crowd(max_num_seqs=128)
    cured = all_of_them.preempted > 0 and not rest.preempted and rest.itl_p99 < all_of_them.itl_p99
    return Outcome(figures, cured and not same, cured, explained=same)


def more_room() -> Outcome:
    """The crowd with an FP8 KV cache, with two GPUs, and with a larger GPU."""
    before = _crowd(max_num_seqs=128)
    narrow, two = _crowd(max_num_seqs=128, kv_cache_dtype="fp8"), _crowd(max_num_seqs=128, tensor_parallel_size=2)
    large = closed_loop(Server(MISTRAL, "L40S", {**SMALL.flags}), ANSWERS, CROWD, rounds=0.5)
    figures = {
        "before": 100 * before.preempted,
        "narrow": 100 * narrow.preempted,
        "two": 100 * two.preempted,
        "large": 100 * large.preempted,
    }
    return Outcome(figures, all(100 * one.preempted < 0.1 * figures["before"] for one in (narrow, two, large)))


REUSES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8)


def prefix_reuse() -> Outcome:
    """Throughput gain of prefix caching with 48 clients, by shared part of the prompt."""
    server = L40S.with_flags(max_model_len=4096)
    without = closed_loop(server.with_flags(enable_prefix_caching=False), Traffic(2048, 256), 48)
    figures: dict[str, float] = {}
    for reuse in REUSES:
        served = closed_loop(server, Traffic(2048, 256, shared=round(2048 * reuse)), 48)
        figures[f"gain_{reuse * 100:.0f}"] = 100 * (served.tokens_per_second / without.tokens_per_second - 1)
    gains = list(figures.values())
    none_below = all(gain <= 0 for reuse, gain in zip(REUSES, gains, strict=True) if reuse < 0.35)
    return Outcome(figures, as_claimed=none_below, explained=gains[0] == 0 and rising(*gains))


def prefixes_that_stay() -> Outcome:
    """Half of each prompt repeats, from 1, 32 and 100 prefixes in turn."""
    server = L40S.with_flags(max_model_len=4096)
    figures: dict[str, float] = {"tokens": server.memory().tokens}
    for groups in (1, 32, 100):
        served = closed_loop(server, Traffic(2048, 256, shared=1024, groups=groups), 48, rounds=4)
        figures[f"hits_{groups}"] = 100 * served.reused
    held = close(figures["hits_32"], 50, 0.1)
    return Outcome(figures, held and figures["hits_100"] > 40, held and figures["hits_100"] < 10)


LONG_PROMPTS = Traffic(256, 256, every=20, long_prompt=16_384)


@cache
def _long_prompts(step: int | None) -> Served:
    """24 clients, every 20th prompt is long; ``step`` is max-num-batched-tokens, None without chunked prefill."""
    server = L40S.with_flags(max_model_len=32768, enable_prefix_caching=False, max_num_batched_tokens=step)
    return closed_loop(server if step else server.with_flags(enable_chunked_prefill=False), LONG_PROMPTS, 24, rounds=3)


def chunked_prefill() -> Outcome:
    """The longest gap between tokens without chunked prefill and with steps of 8,192, 2,048 and 512 tokens."""
    figures: dict[str, float] = {}
    runs = [_long_prompts(step) for step in (None, 8192, 2048, 512)]
    for name, served in zip(("off", "8192", "2048", "512"), runs, strict=True):
        figures |= {
            f"max_{name}": 1000 * served.itl_max,
            f"p99_{name}": 1000 * served.itl_p99,
            f"ttft_{name}": served.ttft_p99,
        }
    shorter = rising(*(-served.itl_max for served in runs))
    p99_too = rising(*(-served.itl_p99 for served in runs))
    return Outcome(figures, shorter and p99_too, shorter, explained=rising(*(served.ttft_p99 for served in runs)))


def contention() -> Outcome:
    """Few and many clients with short prompts, and few clients with some long prompts."""
    server, short = L40S.with_flags(max_model_len=32768, enable_prefix_caching=False), Traffic(256, 256)
    few, many = (closed_loop(server, short, clients) for clients in (4, 96))
    long = closed_loop(server, Traffic(256, 256, every=5, long_prompt=16_384), 4, rounds=4)
    ratios = {name: one.itl_p99 / one.itl_p50 for name, one in (("few", few), ("many", many), ("long", long))}
    return Outcome(ratios, ratios["long"] > 3 and ratios["many"] < 1.5 and ratios["few"] < 1.5)


RATES = (1, 2, 4, 8, 16)


def ceiling_by_itl() -> Outcome:
    """p99 ITL and TTFT at rates that double; the last rate exceeds the server's capacity."""
    server = Server(MISTRAL, "L40S", APART)
    figures: dict[str, float] = {}
    runs = [open_loop(server, arrivals(Traffic(1024, 256), rate, 200)) for rate in RATES]
    for rate, served in zip(RATES, runs, strict=True):
        figures |= {f"itl_{rate}": 1000 * served.itl_p99, f"ttft_{rate}": served.ttft_p99}
    found = any(2 * before.itl_p99 < after.itl_p99 for before, after in pairwise(runs))
    level = close(runs[-1].itl_p99, runs[2].itl_p99, 0.05)
    return Outcome(figures, as_claimed=found, explained=level and runs[-1].ttft_p99 > 3 * runs[2].ttft_p99)


def order_of_impact() -> Outcome:
    """Throughput gain of each of four changes alone: 8 clients, 160 clients, 160 that share half of the prompt."""
    base = L40S.with_flags(max_model_len=4096, **BEFORE_V1)
    apart, half = Traffic(2048, 256), Traffic(2048, 256, shared=1024)
    changes = {
        "quantization": base.with_flags(quantization="fp8"),
        "cache": base.with_flags(kv_cache_dtype="fp8"),
        "prefix": base.with_flags(enable_prefix_caching=True),
        "chunks": base.with_flags(enable_chunked_prefill=True),
    }
    figures: dict[str, float] = {}
    for kind, clients, traffic in (("few", 8, half), ("many", 160, apart)):
        before = closed_loop(base, traffic, clients).tokens_per_second
        for name, server in changes.items():
            figures[f"{kind}_{name}"] = gained(closed_loop(server, traffic, clients).tokens_per_second, before)
    # Shared prompts change nothing without prefix caching.
    sharing = closed_loop(changes["prefix"], half, 160).tokens_per_second
    figures |= {f"shared_{name}": figures[f"many_{name}"] for name in changes}
    figures["shared_prefix"] = gained(sharing, before)
    in_order = all(rising(*(-figures[f"{kind}_{name}"] for name in changes)) for kind in ("few", "many", "shared"))
    last, above = figures["many_prefix"] < 1, figures["shared_prefix"] > figures["shared_cache"]
    return Outcome(figures, in_order, explained=last and above and max(figures.values()) > 60)


CLAIMS = (
    Claim(
        "tiers",
        Source.RESULTS,
        "Mistral-7B on an L40S, 2K in and 1K out: defaults, capped context, and chunked prefill with prefix caching "
        "run 42, 89 and 134 sequences at a p99 ITL of 185, 112 and 78 ms.",
        "128 clients; both features off, then with max-model-len 3,072, then both on for prompts that share half",
        "{defaults:.0f}, {capped:.0f} and {shared:.0f} sequences; {defaults_itl:.0f}, {capped_itl:.0f} and "
        "{shared_itl:.0f} ms",
        Verdict.CONDITIONAL,
        "The order holds without chunked prefill, where a step must hold the longest prompt: the cap makes steps "
        "smaller and frees their activation memory. The third tier comes from shared prompts; without sharing it is "
        "{apart:.0f} sequences and {apart_itl:.0f} ms.",
        tiers,
    ),
    Claim(
        "tiers-today",
        Source.RULE,
        "Capping the context alone gives the second tier.",
        "The same traffic with the defaults of the V1 engine, with and without max-model-len 3,072",
        "{sequences:.0f} sequences and {itl:.0f} ms with both",
        Verdict.WRONG,
        "The V1 engine has chunked prefill and prefix caching on by default, so its defaults are the third tier. "
        "Chunked prefill can still be turned off; vLLM then warns that this is not supported.",
        tiers_today,
    ),
    Claim(
        "memory-efficiency",
        Source.RESULTS,
        "The three tiers use 68%, 84% and 91% of the memory.",
        "The share of the KV cache in use in the runs above",
        "{defaults:.0f}%, {capped:.0f}% and {shared:.0f}%",
        Verdict.WRONG,
        "Blocks of 16 tokens are allocated as needed, so a queue fills the KV cache in every tier. The last has room "
        "left because shared blocks are stored once.",
        memory_efficiency,
    ),
    Claim(
        "max-num-seqs",
        Source.RESULTS,
        "A 70B model, max-num-seqs from 1 to 1,024: throughput rises from 40 to 3,700 tokens/s, with diminishing "
        "returns, and latency from 25 to 277 ms.",
        "Llama-3.3-70B in BF16 on 4 A100 80 GB, as many clients as max-num-seqs, 32 tokens in and 128 out: 1 / 16 / 64 "
        "/ 128 / 256 / 512 / 1,024",
        "{rate_1:,.0f} / {rate_16:,.0f} / {rate_64:,.0f} / {rate_128:,.0f} / {rate_256:,.0f} / {rate_512:,.0f} / "
        "{rate_1024:,.0f} tokens/s at {itl_1:.0f} / {itl_16:.0f} / {itl_64:.0f} / {itl_128:.0f} / {itl_256:.0f} / "
        "{itl_512:.0f} / {itl_1024:.0f} ms",
        Verdict.CONDITIONAL,
        "True up to 256. Beyond that, compute is the limit and only latency grows. The requests must fit: with 2K in "
        "and 1K out, the KV cache holds {held:.0f}.",
        max_num_seqs,
    ),
    Claim(
        "preemption-symptom",
        Source.SYMPTOM,
        "When the KV cache runs out, p99 ITL is several times its median while the mean throughput holds.",
        "Mistral-7B on an A10, 128 clients with 512 tokens in and out; max-num-seqs 128 and 64",
        "p99 is {crowded:.1f} times the median with preemptions, {fitting:.1f} times without; {crowded_rate:,.0f} and "
        "{fitting_rate:,.0f} tokens/s; {usage:.0f}% of the KV cache used",
        Verdict.HOLDS,
        "Preempted requests are recomputed in steps that delay all others.",
        preemption_symptom,
    ),
    Claim(
        "fewer-sequences",
        Source.FIX,
        "Lower max-num-seqs against preemptions.",
        "The same with 128 / 64 / 32",
        "{many_preempted:.0f} / {fitting_preempted:.0f} / {few_preempted:.0f} preemptions per 100 requests; p99 ITL "
        "{many_itl:.0f} / {fitting_itl:.0f} / {few_itl:.0f} ms; {many_rate:,.0f} / {fitting_rate:,.0f} / "
        "{few_rate:,.0f} tokens/s",
        Verdict.HOLDS,
        "The best value is the number that fits: it even raises throughput, since nothing is recomputed. Below it, "
        "throughput falls.",
        fewer_sequences,
    ),
    Claim(
        "shorter-context",
        Source.FIX,
        "Lower max-model-len against preemptions.",
        "Mistral-7B on an A10; every tenth request has 12,000 tokens; max-model-len 32,768 and 4,096",
        "{long:.0f} → {rest:.0f} preemptions per 100 requests, p99 ITL {long_itl:.0f} → {rest_itl:.0f} ms; "
        "{refused:.0f}% of the requests are refused",
        Verdict.CONDITIONAL,
        "It helps only by refusing longer requests. If none is that long, nothing changes.",
        shorter_context,
    ),
    Claim(
        "more-room",
        Source.FIX,
        "Against preemptions, use an FP8 KV cache, tensor parallelism, or a GPU with more memory.",
        "128 clients on an A10 as above; with an FP8 cache, with two A10s, with an L40S",
        "{before:.0f} → {narrow:.0f}, {two:.0f} and {large:.0f} preemptions per 100 requests",
        Verdict.HOLDS,
        "With each of them, all 128 fit. An A10 needs FlashInfer for an FP8 cache (see below).",
        more_room,
    ),
    Claim(
        "prefix-reuse",
        Source.RULE,
        "Prefix caching pays off from a reuse of 0.35 on, and is better turned off for unique prompts.",
        "Mistral-7B on an L40S, 48 clients, 2,048 tokens in and 256 out, of which 0 / 5 / 10 / 20 / 35 / 50 / 80% are "
        "shared",
        "{gain_0:+.0f} / {gain_5:+.0f} / {gain_10:+.0f} / {gain_20:+.0f} / {gain_35:+.0f} / {gain_50:+.0f} / "
        "{gain_80:+.0f}% throughput",
        Verdict.WRONG,
        "There is no threshold: it pays off from the first shared block on, with {gain_5:.0f}% at a reuse of 5%. The "
        "model does not count the cost of hashing blocks, so for unique prompts it shows only that no request is "
        "delayed.",
        prefix_reuse,
    ),
    Claim(
        "prefixes-that-stay",
        Source.RULE,
        "The repeated share of a prompt decides.",
        "The same with half of each prompt repeated: 1 / 32 / 100 prefixes of 1,024 tokens in turn; the KV cache "
        "holds {tokens:,.0f} tokens",
        "{hits_1:.0f} / {hits_32:.0f} / {hits_100:.0f}% of prompt tokens hit the cache",
        Verdict.CONDITIONAL,
        "True as long as the prefixes stay in the cache next to running requests: 100 prefixes evict each other just "
        "before they are needed again.",
        prefixes_that_stay,
    ),
    Claim(
        "chunked-prefill",
        Source.FIX,
        "Chunked prefill removes the spikes in ITL that long prompts cause.",
        "Mistral-7B on an L40S, 24 clients, every 20th prompt with 16,384 tokens; off, and on with "
        "max-num-batched-tokens 8,192 / 2,048 / 512",
        "Longest gap {max_off:,.0f}, {max_8192:.0f} / {max_2048:.0f} / {max_512:.0f} ms; p99 {p99_off:.0f}, "
        "{p99_8192:.0f} / {p99_2048:.0f} / {p99_512:.0f} ms; TTFT p99 {ttft_off:.2f}, {ttft_8192:.2f} / "
        "{ttft_2048:.2f} / {ttft_512:.2f} s",
        Verdict.CONDITIONAL,
        "The longest gap shrinks with the step size. p99 can grow, because one spike becomes several smaller ones. "
        "It is on by default in the V1 engine; the flag to change is max-num-batched-tokens.",
        chunked_prefill,
    ),
    Claim(
        "contention",
        Source.SYMPTOM,
        "Prefill and decode on one GPU: ITL spikes come with long prompts, not with load.",
        "p99 ITL divided by its median: 4 and 96 clients with short prompts; 4 clients, every 5th prompt with 16,384 "
        "tokens",
        "{few:.1f} and {many:.1f}; {long:.1f}",
        Verdict.HOLDS,
        "Load alone makes all steps longer, but evenly.",
        contention,
    ),
    Claim(
        "ceiling-by-itl",
        Source.RULE,
        "The highest rate a server sustains is where p99 ITL grows faster than the rate.",
        "Mistral-7B on an L40S, 200 requests with 1,024 tokens in and 256 out, arriving at random, 1 / 2 / 4 / 8 / 16 "
        "per second",
        "p99 ITL {itl_1:.0f} / {itl_2:.0f} / {itl_4:.0f} / {itl_8:.0f} / {itl_16:.0f} ms; p99 TTFT {ttft_1:.2f} / "
        "{ttft_2:.2f} / {ttft_4:.2f} / {ttft_8:.2f} / {ttft_16:.2f} s",
        Verdict.WRONG,
        "p99 ITL is the duration of a step with prompts: one prompt at first, two from 4 requests per second on. Two "
        "fill max-num-batched-tokens, so p99 ITL never grows faster than the rate, and not at all past the ceiling. "
        "TTFT does, because requests queue.",
        ceiling_by_itl,
    ),
    Claim(
        "order-of-impact",
        Source.RULE,
        "Quantization gains most, then an FP8 KV cache, prefix caching and chunked prefill.",
        "Mistral-7B on an L40S, all four off, then each alone: 8 clients that share half of the prompt / 160 that "
        "share nothing / 160 that share half",
        "FP8 weights {few_quantization:+.0f} / {many_quantization:+.0f} / {shared_quantization:+.0f}%, FP8 cache "
        "{few_cache:+.0f} / {many_cache:+.0f} / {shared_cache:+.0f}%, prefix caching {few_prefix:+.0f} / "
        "{many_prefix:+.0f} / {shared_prefix:+.0f}%, chunked prefill {few_chunks:+.0f} / {many_chunks:+.0f} / "
        "{shared_chunks:+.0f}% throughput",
        Verdict.WRONG,
        "Traffic decides: prefix caching is last if nothing repeats and as good as quantization if half does; an FP8 "
        "cache helps when the KV cache is full. Chunked prefill changes latency, not throughput.",
        order_of_impact,
    ),
)
