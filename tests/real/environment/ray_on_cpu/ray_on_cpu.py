"""For tests only: lets vLLM's CPU platform use Ray, which vLLM refuses. Each rank takes what Ray calls a GPU."""


def platform():
    """Entry point of vLLM's ``vllm.platform_plugins``: the name of the platform's class."""
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
