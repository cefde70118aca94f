"""vLLM's CPU platform with Ray, which vLLM itself refuses there: a rank takes what Ray calls a GPU. For tests only."""


def platform():
    """The name of the platform's class, for vLLM's entry point ``vllm.platform_plugins``."""
    return "ray_on_cpu.RayOnCpu"


def __getattr__(name):
    # vLLM must be importable without a platform while it chooses one.
    if name != "RayOnCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class RayOnCpu(CpuPlatform):
        ray_device_key = "GPU"

    RayOnCpu.__module__ = __name__
    globals()[name] = RayOnCpu
    return RayOnCpu
