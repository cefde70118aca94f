"""Claims about memory: computed with the plan's budget, and by serving with less or more of it."""

from __future__ import annotations

import random

from guides.claim import Claim, Outcome, Source, Verdict, close, rising
from guides.serving import Server, Traffic, closed_loop, quantile
from vllm_launchers.engine_model.gpu_models import find_gpu
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate, loaded_weights
from vllm_launchers.simulated.memory import MemoryBudgetError
from vllm_launchers.simulated.settings import ValidationError
from vllm_launchers.vllm.flags.changes import Flags, FlagValue
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.modelfacts.known import known_facts

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
LLAMA_70B_FP8 = "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
LLAMA_70B_AWQ = "casperhansen/llama-3.3-70b-instruct-awq"
QWEN_72B = "Qwen/Qwen2.5-72B-Instruct"
RELEASE = (0, 33, 0)

APART: Flags = {"max-model-len": 4096, "enable-prefix-caching": False}
"""For prompts that share nothing and are not preempted: hashing their blocks would only take time."""

SMALL = Server(MISTRAL, "A10", {"max-model-len": 4096})
"""A server with little room for the KV cache: 14.5 GB of weights on a 24 GB GPU."""


def facts_of(model: str) -> ModelFacts:
    """Facts of a model in the product's table."""
    facts = known_facts(model)
    assert facts is not None, model
    return facts


def budget(model: str, gpu: str, **flags: FlagValue) -> MemoryBudget:
    """The plan's estimate; underscores in the names of flags stand for dashes."""
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    known = find_gpu(gpu)
    made = estimate(facts_of(model), named, [GpuShape(known.name, known.memory_gib)], release=RELEASE)
    assert made is not None
    return made


def kv_pool() -> Outcome:
    """The plan's KV cache compared with the guide's subtraction, with and without vLLM's units."""
    figures: dict[str, float] = {}
    nominal, reported = [], []
    off = 0.0
    for name, gpu, sold in (("l40s", "L40S", 48), ("a40", "A100-SXM4-40GB", 40), ("a80", "A100-SXM4-80GB", 80)):
        made = budget(MISTRAL, gpu, max_model_len=4096, gpu_memory_utilization=0.9)
        figures[name] = made.kv_gib * 1.073741824
        total = figures[f"{name}_total"] = made.per_gpu[0].total_gib
        by_box = sold * 0.9 - 14 - 1.5
        off = max(off, 100 * abs(by_box / figures[name] - 1))
        nominal.append(close(by_box, figures[name], 0.03))
        reported.append(close(total * 0.9 - made.weights_gib - 1.5 / 1.073741824, made.kv_gib, 0.03))
    return Outcome({**figures, "off": off}, as_claimed=all(nominal), with_condition=all(reported))


def kv_per_token() -> Outcome:
    """Bytes of keys and values per token of a 70B on one of eight GPUs."""
    made = budget(LLAMA_70B, "H100 80GB HBM3", tensor_parallel_size=8, max_model_len=4096)
    per_token = made.kv_bytes_per_token or 0.0
    return Outcome({"bytes": per_token}, as_claimed=per_token == 80, explained=per_token == 2 * 1 * 128 * 2 * 80)


def bytes_per_parameter() -> Outcome:
    figures = {}
    for name, model in (("bf16", LLAMA_70B), ("fp8", LLAMA_70B_FP8), ("awq", LLAMA_70B_AWQ)):
        facts, weights = facts_of(model), loaded_weights(facts_of(model), {}, RELEASE)
        assert weights is not None
        figures[name] = weights.total / (facts.parameters or 0)
    exact = figures["fp8"] == 1 and figures["awq"] == 0.5
    near = figures["bf16"] == 2 and close(figures["fp8"], 1, 0.05) and close(figures["awq"], 0.5, 0.15)
    small = facts_of("casperhansen/llama-3.1-8b-instruct-awq")
    loaded = loaded_weights(small, {}, RELEASE)
    assert loaded is not None
    figures["awq_8b"] = loaded.total / (small.parameters or 0)
    return Outcome(figures, exact, near, explained=figures["awq_8b"] > 1.2 * figures["awq"])


def cards_for_70b() -> Outcome:
    """Memory left for the KV cache of two large models on one, two and four 80 GB GPUs."""
    left = {
        (name, count, share): budget(
            model, "H100 80GB HBM3", tensor_parallel_size=count, max_model_len=4096, gpu_memory_utilization=share
        )
        for name, model in (("qwen", QWEN_72B), ("llama", LLAMA_70B))
        for count, share in ((1, 0.9), (2, 0.9), (2, 0.95), (4, 0.9))
    }
    figures = {f"{name}_{count}_{share * 100:.0f}": made.kv_gib for (name, count, share), made in left.items()}
    figures["qwen_lacks"] = -figures["qwen_2_90"]
    tokens = {f"{name}_tokens_{count}": float(left[name, count, 0.9].kv_tokens or 0) for name, count, _ in left}
    at_90 = left["qwen", 2, 0.9].fits and left["llama", 4, 0.9].fits
    condition = left["qwen", 2, 0.95].fits and left["llama", 4, 0.9].fits and left["llama", 2, 0.9].fits
    none = not left["qwen", 1, 0.9].fits and not left["llama", 1, 0.9].fits
    return Outcome({**figures, **tokens}, at_90 and none, condition and none)


def fp8_cache() -> Outcome:
    """Bytes per token, tokens and requests with an FP8 KV cache."""
    wide, narrow = SMALL.memory(), SMALL.with_flags(kv_cache_dtype="fp8").memory()
    figures = {
        "share": 100 * narrow.block_bytes / wide.block_bytes,
        "wide": wide.tokens,
        "narrow": narrow.tokens,
    }
    return Outcome(figures, as_claimed=close(narrow.block_bytes, wide.block_bytes / 2, 0.01))


def utilization() -> Outcome:
    """64 clients on a 24 GB GPU, with utilization from 0.80 to 0.95."""
    figures: dict[str, float] = {}
    tokens, sequences, rates = [], [], []
    for percent in (80, 85, 90, 95):
        server = SMALL.with_flags(gpu_memory_utilization=percent / 100)
        served = closed_loop(server, Traffic(512, 512), 64, rounds=0.5)
        tokens.append(server.memory().tokens)
        sequences.append(served.sequences)
        rates.append(served.tokens_per_second)
        figures |= {
            f"tokens_{percent}": server.memory().tokens,
            f"sequences_{percent}": served.sequences,
            f"preempted_{percent}": 100 * served.preempted,
            f"rate_{percent}": served.tokens_per_second,
        }
    grows = rising(*tokens) and rising(*sequences) and rising(*rates)
    none_left = figures["preempted_95"] == 0
    falls = rising(*(-figures[f"preempted_{percent}"] for percent in (80, 85, 90, 95)))
    return Outcome(figures, grows and falls, grows and none_left, explained=figures["preempted_90"] > 50)


def high_utilization() -> Outcome:
    """Peak activations and unused GPU memory at 0.95, with short and long contexts and with larger steps."""
    model = "meta-llama/Llama-3.1-8B-Instruct"
    short, long, large = (
        budget(model, "L40S", gpu_memory_utilization=0.95, max_model_len=length, max_num_batched_tokens=step)
        for length, step in ((4096, 8192), (131072, 8192), (4096, 32768))
    )
    free = [made.per_gpu[0].free_gib for made in (short, long, large)]
    figures = {
        "short": short.overhead_gib,
        "long": long.overhead_gib,
        "large": large.overhead_gib,
        "free": free[0],
        "kv": short.kv_gib,
        "kv_large": large.kv_gib,
    }
    same = long.overhead_gib == short.overhead_gib and close(max(free), min(free), 0.001)
    return Outcome(figures, as_claimed=not same, explained=large.overhead_gib > short.overhead_gib)


def context_sweep() -> Outcome:
    """The same requests under three context limits: 128 clients with 512 tokens in and out."""
    figures: dict[str, float] = {}
    seen = []
    for length in (32768, 4096, 1024):
        server = SMALL.with_flags(max_model_len=length)
        memory, served = server.memory(), closed_loop(server, Traffic(512, 512), 128, rounds=0.5)
        seen.append((memory.tokens, served))
        figures[f"full_{length}"] = memory.concurrency
    tokens, served = seen[0]
    figures |= {"tokens": tokens, "sequences": served.sequences, "preempted": 100 * served.preempted}
    unchanged = all(other == seen[0] for other in seen)
    return Outcome(
        figures, as_claimed=not unchanged, explained=rising(*(figures[f"full_{n}"] for n in (32768, 4096, 1024)))
    )


def p95_context() -> Outcome:
    """The share of requests longer than p95 in + p95 out: with independent and with fully dependent lengths."""
    rng = random.Random(1)
    inputs = [rng.lognormvariate(6.5, 0.8) for _ in range(20_000)]
    outputs = [rng.lognormvariate(5.5, 0.8) for _ in range(20_000)]
    limit = quantile(inputs, 0.95) + quantile(outputs, 0.95)
    apart = sum(one + other > limit for one, other in zip(inputs, outputs, strict=True)) / len(inputs)
    together = sum(one + other > limit for one, other in zip(sorted(inputs), sorted(outputs), strict=True)) / len(
        inputs
    )
    return Outcome({"apart": 100 * apart, "together": 100 * together}, False, 0.005 < apart < together <= 0.05)


def head_divisors() -> Outcome:
    """Tensor-parallel sizes that vLLM accepts for 64 heads, and what 16 GPUs save."""
    refused = []
    for size in (2, 3, 4, 6, 8, 12, 16):
        try:
            Server(LLAMA_70B, "H100 80GB HBM3", {"tensor-parallel-size": size, "max-model-len": 4096}).core()
        except ValidationError:
            refused.append(size)
        except MemoryBudgetError:
            continue  # accepted, but it does not fit
    eight, sixteen = (
        budget(LLAMA_70B, "H100 80GB HBM3", tensor_parallel_size=size, max_model_len=4096) for size in (8, 16)
    )
    same = eight.kv_bytes_per_token == sixteen.kv_bytes_per_token
    return Outcome({"bytes": sixteen.kv_bytes_per_token or 0.0}, as_claimed=refused == [3, 6, 12], explained=same)


CLAIMS = (
    Claim(
        "kv-pool",
        Source.FORMULA,
        "KV cache = VRAM × utilization − weights − about 1.5 GB. Mistral-7B in BF16 at 0.90: about 29 GB on an L40S, "
        "22 on an A100 40 GB, 58 on an A100 80 GB.",
        "The plan's memory budget for the three GPUs",
        "{l40s:.1f}, {a40:.1f} and {a80:.1f} GB",
        Verdict.CONDITIONAL,
        "Right within 3% in GiB, with the memory that CUDA reports ({l40s_total:.1f}, {a40_total:.1f} and "
        "{a80_total:.1f} GiB). With nominal sizes it is up to {off:.0f}% off, since an 80 GB A100 has 80 GiB.",
        kv_pool,
    ),
    Claim(
        "kv-per-token",
        Source.FORMULA,
        "A 70B model needs 80 bytes of KV cache per token on each of 8 GPUs.",
        "The plan's memory budget for Llama-3.3-70B, TP 8",
        "{bytes:,.0f} bytes",
        Verdict.WRONG,
        "Keys and values × 1 head × 128 numbers × 2 bytes = 512 bytes per layer, times 80 layers.",
        kv_per_token,
    ),
    Claim(
        "bytes-per-parameter",
        Source.FORMULA,
        "Weights take 2 bytes per parameter in BF16, 1 in 8-bit and 0.5 in 4-bit formats.",
        "The plan's size of Llama-3.3-70B as BF16, FP8 and AWQ",
        "{bf16:.2f}, {fp8:.2f} and {awq:.2f} bytes",
        Verdict.CONDITIONAL,
        "True for large models. Embeddings stay 16-bit, and 4-bit formats add scales: an 8B model in AWQ takes "
        "{awq_8b:.2f}.",
        bytes_per_parameter,
    ),
    Claim(
        "cards-for-70b",
        Source.RULE,
        "Qwen2.5-72B in BF16 needs at least two GPUs of 80 GB; Llama-3.3-70B in 16 bits runs on four.",
        "The plan's memory budget on 1, 2 and 4 H100 80 GB at 0.90 and 0.95",
        "KV cache per GPU: Qwen on two is {qwen_lacks:.1f} GiB short at 0.90 and has {qwen_2_95:.1f} at 0.95; Llama "
        "has {llama_2_90:.1f} on two and {llama_4_90:.1f} on four",
        Verdict.CONDITIONAL,
        "Qwen fits on two only above 0.90. Llama's KV cache holds {llama_tokens_2:,.0f} tokens on two GPUs, "
        "{llama_tokens_4:,.0f} on four.",
        cards_for_70b,
    ),
    Claim(
        "fp8-cache",
        Source.RULE,
        "An FP8 KV cache takes about half (54%).",
        "Mistral-7B on an A10 with `--kv-cache-dtype fp8`",
        "{share:.0f}% per token; {wide:,.0f} → {narrow:,.0f} tokens",
        Verdict.HOLDS,
        "Exactly half, since scales are stored per layer, not per token.",
        fp8_cache,
    ),
    Claim(
        "utilization",
        Source.RESULTS,
        "Higher utilization gives more KV cache tokens, more concurrent sequences and fewer preemptions.",
        "Mistral-7B on an A10, 64 clients with 512 tokens in and out, 0.80 / 0.85 / 0.90 / 0.95",
        "{tokens_80:,.0f} / {tokens_85:,.0f} / {tokens_90:,.0f} / {tokens_95:,.0f} tokens; {sequences_80:.0f} / "
        "{sequences_85:.0f} / {sequences_90:.0f} / {sequences_95:.0f} sequences; {preempted_80:.0f} / "
        "{preempted_85:.0f} / {preempted_90:.0f} / {preempted_95:.0f} preemptions per 100 requests",
        Verdict.CONDITIONAL,
        "Tokens, sequences and throughput always grow. Preemptions stop once all sequences fit; until then a larger "
        "cache only admits more sequences.",
        utilization,
    ),
    Claim(
        "high-utilization",
        Source.RULE,
        "0.95 is safe only with a short context: a long prompt's activations need the rest.",
        "The plan's memory budget for Llama-3.1-8B on an L40S at 0.95: context 4,096 and 131,072 with steps of 8,192 "
        "tokens; steps of 32,768",
        "{short:.2f} GiB besides weights and KV cache for both contexts, {large:.2f} GiB with the larger steps; "
        "{free:.1f} GiB remain free in all three",
        Verdict.WRONG,
        "Activations depend on `max-num-batched-tokens`, not on the context (except with multi-head latent "
        "attention), and vLLM measures them with a full step before it sizes the KV cache: a larger step shrinks the "
        "cache, not the rest. The rest is for other processes and for memory that vLLM does not measure.",
        high_utilization,
    ),
    Claim(
        "context-sweep",
        Source.RESULTS,
        "A lower max-model-len leaves more KV cache, so more sequences run and fewer are preempted.",
        "Mistral-7B on an A10, 128 clients with 512 tokens in and out; max-model-len 32,768 / 4,096 / 1,024",
        "{tokens:,.0f} tokens, {sequences:.0f} sequences and {preempted:.0f} preemptions per 100 requests with all "
        "three",
        Verdict.WRONG,
        "Blocks are allocated as a request grows, not for its maximum length. Only the log line with the maximum "
        "concurrency at full length changes: {full_32768:.1f} / {full_4096:.1f} / {full_1024:.1f}.",
        context_sweep,
    ),
    Claim(
        "p95-context",
        Source.RULE,
        "max-model-len = p95 of the input + p95 of the output.",
        "20,000 requests with log-normal lengths, input and output independent / rising together",
        "{apart:.1f}% / {together:.1f}% of requests are longer",
        Verdict.CONDITIONAL,
        "True if refusing up to 5% of requests is acceptable. It only limits what one request can take and frees no "
        "memory (see above).",
        p95_context,
    ),
    Claim(
        "head-divisors",
        Source.RULE,
        "TP must divide the attention heads: 2, 4, 8 or 16 for 64 heads.",
        "Starting Llama-3.3-70B with TP 2, 3, 4, 6, 8, 12 and 16",
        "3, 6 and 12 are refused",
        Verdict.HOLDS,
        "But its 8 KV heads can't be divided further: TP 16 stores {bytes:,.0f} bytes per token on each GPU, like TP "
        "8.",
        head_divisors,
    ),
)
