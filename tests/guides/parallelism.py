"""Claims about several GPUs and about precision: GPU interconnects, replicas, FP8 and 4-bit formats."""

from __future__ import annotations

from guides.claim import Claim, Outcome, Source, Verdict, gained, rising
from guides.memory import APART, LLAMA_70B, LLAMA_70B_AWQ, LLAMA_70B_FP8, MISTRAL, RELEASE
from guides.serving import Served, Server, Traffic, closed_loop
from vllm_launchers.engine_model.gpu_models import PCIE_LANE_GBS, Interconnect, over_pcie_slot
from vllm_launchers.plan.attention import fp8_cache_support

H100 = "H100 80GB HBM3"
SLOT = PCIE_LANE_GBS[5] * 16e9
SIZES = (2, 4, 8)


def _group(size: int, link: Interconnect | None, clients: int) -> Served:
    """A 70B in FP8 on ``size`` H100s connected by ``link``."""
    server = Server(LLAMA_70B_FP8, H100, {**APART, "tensor-parallel-size": size}, link)
    return closed_loop(server, Traffic(1024, 128), clients)


def links() -> Outcome:
    """Throughput and p99 ITL of 32 clients by interconnect and group size."""
    figures: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    by = {"nvlink": None, "switch": over_pcie_slot(SLOT), "cpu": over_pcie_slot(SLOT, by_cpu=True)}
    for name, link in by.items():
        served = [_group(size, link, 32) for size in SIZES]
        rates[name] = [one.tokens_per_second for one in served]
        for size, one in zip(SIZES, served, strict=True):
            figures |= {f"{name}_{size}": one.tokens_per_second, f"{name}_itl_{size}": 1000 * one.itl_p99}
    gain = {name: rate[-1] / rate[0] for name, rate in rates.items()}
    order = rising(gain["cpu"], gain["switch"], gain["nvlink"]) and rising(*rates["nvlink"])
    return Outcome(figures, order and gain["cpu"] < 1.1 < 1.15 < gain["switch"])


def smaller_group() -> Outcome:
    """TP 8 → 2 with copies through the CPU and with one switch between all GPUs; 1 and 32 clients."""
    figures: dict[str, float] = {}
    for name, link in (("switch", over_pcie_slot(SLOT)), ("cpu", over_pcie_slot(SLOT, by_cpu=True))):
        for size in (8, 2):
            figures[f"{name}_{size}"] = 1000 * _group(size, link, 32).itl_p99
            figures[f"{name}_one_{size}"] = 1000 * _group(size, link, 1).itl_p50
    cpu, switch = figures["cpu_2"] < figures["cpu_8"], figures["switch_2"] < figures["switch_8"]
    slower = figures["cpu_one_2"] > figures["cpu_one_8"] and figures["switch_one_2"] > figures["switch_one_8"]
    return Outcome(figures, cpu and switch, cpu, explained=slower)


def replicas() -> Outcome:
    """One group of eight GPUs, compared with two of four and half of the clients each."""
    figures: dict[str, float] = {}
    for clients in (32, 512):
        for size, copies in ((8, 1), (4, 2)):
            server = Server(LLAMA_70B_FP8, H100, {"tensor-parallel-size": size, **APART, "max-num-seqs": 512})
            served = closed_loop(server, Traffic(128, 128), clients // copies)
            figures |= {
                f"rate_{clients}_{size}": copies * served.tokens_per_second,
                f"itl_{clients}_{size}": 1000 * served.itl_p50,
            }
    busy = figures["rate_512_4"] > figures["rate_512_8"]
    quiet = figures["rate_32_4"] > figures["rate_32_8"]
    latency = figures["itl_32_8"] < figures["itl_32_4"]
    return Outcome(figures, busy and quiet and latency, busy and latency)


def large_models() -> Outcome:
    """TP 2 compared with two replicas for a 7B and a 14B, with few and many clients."""
    figures: dict[str, float] = {}
    for name, model in (("7", MISTRAL), ("14", "Qwen/Qwen2.5-14B-Instruct")):
        for clients in (16, 256):
            for size in (2, 1):
                flags = {"tensor-parallel-size": size, **APART, "max-num-seqs": 256}
                served = closed_loop(Server(model, H100, flags), Traffic(256, 128), clients * size // 2)
                figures[f"{name}_{clients}_{size}"] = served.tokens_per_second * 2 / size

    def split(name: str, clients: int) -> bool:
        """Whether TP 2 gives more than two replicas."""
        return figures[f"{name}_{clients}_2"] > figures[f"{name}_{clients}_1"]

    by_size = all(split("14", clients) and not split("7", clients) for clients in (16, 256))
    by_load = all(split(name, 16) and not split(name, 256) for name in ("7", "14"))
    return Outcome(figures, by_size, by_load)


def fp8_cache_by_gpu() -> Outcome:
    """Throughput gain of an FP8 KV cache when the cache is full, and whether vLLM accepts it on each GPU generation."""
    figures: dict[str, float] = {}
    for name, gpu, share in (("hopper", H100, 0.5), ("ada", "L40S", 0.9), ("ampere", "A100-SXM4-40GB", 0.9)):
        flags = {**APART, "gpu-memory-utilization": share}
        wide, narrow = (
            closed_loop(Server(MISTRAL, gpu, {**flags, "kv-cache-dtype": kind}), Traffic(2048, 256), 160)
            for kind in ("auto", "fp8")
        )
        figures[name] = gained(narrow.tokens_per_second, wide.tokens_per_second)
    hopper, ada, ampere = (fp8_cache_support({}, {}, RELEASE, capability, mla=False) for capability in (9.0, 8.9, 8.0))
    native = hopper.native and not ada.native and not ampere.native
    works = bool(hopper.works and ada.works)
    gains = min(figures.values()) > 3
    return Outcome(figures, native and works and bool(ampere.works), native and works, explained=gains)


def quantization() -> Outcome:
    """Throughput of three formats of a 70B with few and many clients, in total and per GPU."""
    figures: dict[str, float] = {}
    for clients in (32, 256):
        for name, model, size in (("bf16", LLAMA_70B, 4), ("fp8", LLAMA_70B_FP8, 4), ("awq", LLAMA_70B_AWQ, 2)):
            flags = {"tensor-parallel-size": size, **APART, "max-num-seqs": 256}
            served = closed_loop(Server(model, H100, flags), Traffic(256, 128), clients)
            figures[f"{name}_{clients}"] = served.tokens_per_second
            figures[f"{name}_{clients}_each"] = served.tokens_per_second / size
    total = all(rising(*(figures[f"{name}_{clients}"] for name in ("bf16", "fp8", "awq"))) for clients in (32, 256))
    fp8_first = all(
        figures[f"fp8_{clients}"] > figures[f"{name}_{clients}"] for clients in (32, 256) for name in ("bf16", "awq")
    )
    each = rising(*(figures[f"{name}_32_each"] for name in ("bf16", "fp8", "awq")))
    return Outcome(figures, total, explained=fp8_first and each)


CLAIMS = (
    Claim(
        "links",
        Source.RULE,
        "Tensor parallelism only over NVLink or one PCIe switch.",
        "Llama-3.3-70B in FP8 on H100, 32 clients with 1,024 tokens in and 128 out, TP 2 / 4 / 8: over NVLink, over "
        "PCIe 5.0 behind one switch, over PCIe through the CPU",
        "NVLink {nvlink_2:,.0f} / {nvlink_4:,.0f} / {nvlink_8:,.0f} tokens/s, switch {switch_2:,.0f} / "
        "{switch_4:,.0f} / {switch_8:,.0f}, CPU {cpu_2:,.0f} / {cpu_4:,.0f} / {cpu_8:,.0f}",
        Verdict.HOLDS,
        "Through the CPU, four times the GPUs gain nothing: the all-reduces during prefill take as long as the "
        "compute that they save.",
        links,
    ),
    Claim(
        "smaller-group",
        Source.FIX,
        "If p99 is too high because activations cross PCIe, lower TP.",
        "The same, TP 8 → 2",
        "p99 ITL {cpu_8:.0f} → {cpu_2:.0f} ms through the CPU, {switch_8:.0f} → {switch_2:.0f} ms behind a switch; a "
        "single request {cpu_one_8:.0f} → {cpu_one_2:.0f} ms and {switch_one_8:.0f} → {switch_one_2:.0f} ms per token",
        Verdict.CONDITIONAL,
        "True only if copies go through the CPU and many prompts come in. The median gets worse, since each GPU "
        "reads more weights per token.",
        smaller_group,
    ),
    Claim(
        "replicas",
        Source.RULE,
        "A 70B model on eight GPUs: TP 8 for latency, two replicas with TP 4 for throughput.",
        "Llama-3.3-70B in FP8 on 8 H100 with NVLink, 128 tokens in and out, 32 and 512 clients",
        "32: {rate_32_8:,.0f} tokens/s at {itl_32_8:.0f} ms with TP 8, {rate_32_4:,.0f} at {itl_32_4:.0f} with two "
        "replicas; 512: {rate_512_8:,.0f} at {itl_512_8:.0f}, {rate_512_4:,.0f} at {itl_512_4:.0f}",
        Verdict.CONDITIONAL,
        "Replicas win on both once compute and all-reduces are the limit. With few requests, TP 8 wins on both.",
        replicas,
    ),
    Claim(
        "large-models",
        Source.RULE,
        "Use TP from 14B parameters on, or if the weights do not fit.",
        "A 7B and a 14B in BF16 on 2 H100, 256 tokens in and 128 out, 16 and 256 clients: TP 2 and two replicas",
        "7B: {7_16_2:,.0f} and {7_16_1:,.0f} tokens/s with 16, {7_256_2:,.0f} and {7_256_1:,.0f} with 256; 14B: "
        "{14_16_2:,.0f} and {14_16_1:,.0f}, {14_256_2:,.0f} and {14_256_1:,.0f}",
        Verdict.CONDITIONAL,
        "True if the weights or the KV cache do not fit. Otherwise load decides, not size: TP for few requests, "
        "replicas for many, with 7B and 14B alike.",
        large_models,
    ),
    Claim(
        "fp8-cache-by-gpu",
        Source.RULE,
        "An FP8 KV cache is native on Hopper and emulated on Ampere and Ada.",
        "What vLLM 0.33 accepts; and Mistral-7B on an H100 at 0.50, an L40S and an A100 40 GB, 160 clients with 2,048 "
        "tokens in and 256 out, prefix caching off",
        "Accepted on Hopper and Ada, on Ampere only with FlashInfer; throughput {hopper:+.0f} / {ada:+.0f} / "
        "{ampere:+.0f}%",
        Verdict.CONDITIONAL,
        "Attention itself runs in FP8 on Hopper, not on Ada. On Ampere vLLM falls back to Triton, which refuses it "
        "('requires SM89+'), unless FlashInfer can compile its kernel. Wherever it runs, it helps when the KV cache "
        "is full.",
        fp8_cache_by_gpu,
    ),
    Claim(
        "quantization",
        Source.RESULTS,
        "A 70B model: AWQ with TP 2 gives 2,800 tokens/s, FP8 with TP 4 2,380, BF16 with TP 4 1,400.",
        "Llama-3.3-70B on H100 with NVLink, 256 tokens in and 128 out; BF16, FP8 and AWQ with 32 / 256 clients",
        "{bf16_32:,.0f}, {fp8_32:,.0f} and {awq_32:,.0f} tokens/s / {bf16_256:,.0f}, {fp8_256:,.0f} and {awq_256:,.0f}",
        Verdict.WRONG,
        "FP8 always beats BF16, but also AWQ, which computes in 16 bits on half the GPUs. Per GPU, the order holds "
        "with 32 clients ({bf16_32_each:,.0f}, {fp8_32_each:,.0f} and {awq_32_each:,.0f}), where reading weights is "
        "the limit.",
        quantization,
    ),
)
