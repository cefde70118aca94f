"""Hardware limits and values of variables, learned from fake sources in vLLM's forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.vllm.flags.flag_table import VariableKind, VariableSpec
from vllm_launchers.vllm.flags.limits import FP8_COMPRESSED, limits, torch_architectures
from vllm_launchers.vllm.flags.package import Module, Package
from vllm_launchers.vllm.flags.releases import RELEASES, release_table
from vllm_launchers.vllm.flags.variables import reads_all, variable_specs

ENVS = """
import os

def whole(value):
    if value is None:
        return None
    return int(value)

def port():
    if "VLLM_PORT" not in os.environ:
        return None
    port = os.getenv("VLLM_PORT", "0")
    try:
        return int(port)
    except ValueError as err:
        raise ValueError("bad") from err

def lenient():
    text = os.getenv("VLLM_LENIENT", "0")
    try:
        return int(text)
    except ValueError:
        return 0

def overwritten():
    text = os.getenv("VLLM_OVERWRITTEN", "x")
    text = "5"
    return int(text)

environment_variables = {
    "VLLM_WHOLE": lambda: int(os.getenv("VLLM_WHOLE", "5")),
    "VLLM_SWITCH": lambda: bool(int(os.environ.get("VLLM_SWITCH", "0"))),
    "VLLM_SHARE": lambda: val if (val := float(os.getenv("VLLM_SHARE", "10."))) > 0 else 10.0,
    "VLLM_MAYBE": lambda: int(os.getenv("VLLM_MAYBE", "0")) if "VLLM_MAYBE" in os.environ else None,
    "VLLM_GUARDED": lambda: int(os.environ["VLLM_GUARDED"]) if os.environ.get("VLLM_GUARDED") else None,
    "VLLM_OR": lambda: int(os.getenv("VLLM_OR") or "7"),
    "VLLM_STRIPPED": lambda: int(os.getenv("VLLM_STRIPPED", "0").strip()),
    "VLLM_WORD": lambda: os.getenv("VLLM_WORD", "False").lower() in ("true", "1"),
    "VLLM_PATH": lambda: os.path.expanduser(os.getenv("VLLM_PATH", "~")),
    "VLLM_SPLIT": lambda: [int(x) for x in os.getenv("VLLM_SPLIT", "").split(",")],
    "VLLM_HELPED": lambda: whole(os.getenv("VLLM_HELPED")),
    "VLLM_PORT": port,
    "VLLM_LENIENT": lenient,
    "VLLM_OVERWRITTEN": overwritten,
    "VLLM_METHOD": env_with_choices("VLLM_METHOD", "fork", ["spawn", "fork"]),
    "VLLM_LEVEL": env_with_choices("VLLM_LEVEL", "high", ["high", "low"], case_sensitive=False),
    "VLLM_LIST": env_list_with_choices("VLLM_LIST", [], ["a", "b"]),
    "VLLM_LATER": env_with_choices("VLLM_LATER", None, lambda: names()),
    "VERBOSE": lambda: bool(int(os.getenv("VERBOSE", "0"))),
}

def enable_envs_cache():
    for key in environment_variables:
        __getattr__(key)
"""


@pytest.fixture(scope="module")
def envs() -> Module:
    return Module.parse("vllm.envs", ENVS, is_package=False)


@pytest.fixture(scope="module")
def specs(envs: Module) -> dict[str, VariableSpec]:
    return variable_specs(envs)


def test_each_conversion_is_found_and_nothing_else(specs):
    whole = {"VLLM_WHOLE", "VLLM_SWITCH", "VLLM_MAYBE", "VLLM_GUARDED", "VLLM_OR", "VLLM_STRIPPED", "VLLM_HELPED",
             "VLLM_PORT", "VERBOSE"}  # fmt: skip
    assert {name for name, spec in specs.items() if spec.kind is VariableKind.INT} == whole
    assert {name for name, spec in specs.items() if spec.kind is VariableKind.FLOAT} == {"VLLM_SHARE"}
    assert {name for name, spec in specs.items() if spec.kind is VariableKind.CHOICE} == {
        "VLLM_METHOD", "VLLM_LEVEL", "VLLM_LIST"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("VLLM_WHOLE", ("5", " 7 ", "-1", "1_000"), ("", "abc", "1.5", "true", "5s")),
        ("VLLM_SWITCH", ("0", "1", "2"), ("true", "", "on")),
        ("VLLM_SHARE", ("1", "1e3", "nan"), ("", "ten", "1,5")),
        ("VLLM_GUARDED", ("", "4"), ("x",)),
        ("VLLM_OR", ("", "4"), ("x",)),
        ("VLLM_METHOD", ("spawn", "fork"), ("Fork", "", "thread")),
        ("VLLM_LEVEL", ("HIGH", "low"), ("middle",)),
        ("VLLM_LIST", ("a", "a, b", ""), ("a,c",)),
    ],
)
def test_values(specs, name, good, bad):
    assert [text for text in good if specs[name].problem(text)] == []
    assert [text for text in bad if not specs[name].problem(text)] == []


def test_expected_value_is_named(specs):
    assert specs["VLLM_WHOLE"].problem("x") == "a whole number"
    assert specs["VLLM_SHARE"].problem("x") == "a number"
    assert specs["VLLM_METHOD"].problem("x") == "spawn or fork"
    assert specs["VLLM_LIST"].problem("x") == "one or more of a or b"


def test_json_or_a_file():
    spec = VariableSpec(VariableKind.JSON)
    assert [text for text in ('{"a": 1}', "/etc/x", "./x", "x.json") if spec.problem(text)] == []
    assert spec.problem("") == spec.problem("{a}") == "JSON"


def test_start_reads_all_variables_or_not(envs):
    assert reads_all(envs)
    assert not reads_all(Module.parse("vllm.envs", "def enable_envs_cache():\n    pass\n", is_package=False))
    assert variable_specs(Module.parse("vllm.envs", "x = 1", is_package=False)) == {}


def test_release_table_has_variable_values():
    new, old = release_table("0.33.0"), release_table("0.10.2")
    assert new.reads_all
    assert not old.reads_all
    assert new.values["VLLM_ENGINE_READY_TIMEOUT_S"].problem("abc") == "a whole number"
    assert new.values["VLLM_FLOAT32_MATMUL_PRECISION"].problem("HIGH") is None
    assert new.values["VLLM_CPU_KVCACHE_SPACE"].problem("2.5") == "a whole number"
    for release in RELEASES:
        table = release_table(release)
        assert len(table.values) > 40
        assert "fp8" in table.limits.capabilities
        assert {name for name in table.values if name.startswith("VLLM_")} <= table.variables | {"VLLM_DP_RANK_LOCAL"}


LAYERS = "vllm/model_executor/layers/quantization"


def package(folder: Path, files: dict[str, str]) -> Package:
    for name, text in {"vllm/__init__.py": "", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(folder / "vllm")


def test_capabilities_of_methods(tmp_path):
    found = limits(
        package(
            tmp_path,
            {
                "vllm/model_executor/__init__.py": "",
                "vllm/model_executor/layers/__init__.py": "",
                f"{LAYERS}/__init__.py": (
                    "def get_quantization_config(name):\n"
                    "    from .eight import Eight\n"
                    "    from vllm.model_executor.layers.quantization.four import Four\n"
                    "    from .odd import Odd\n"
                    '    table: dict = {"fp8": Eight, "awq": Four, "awq_fast": Four, "odd": Odd, "gone": Gone}\n'
                    "    return table[name]\n"
                ),
                f"{LAYERS}/eight.py": "class Eight:\n    def get_min_capability(cls):\n        return 75\n",
                f"{LAYERS}/four.py": "from .eight import Eight\nclass Four(Eight):\n    pass\n",
                f"{LAYERS}/odd.py": "class Odd:\n    def get_min_capability(cls):\n        return other()\n",
                f"{LAYERS}/compressed_tensors/__init__.py": "",
                f"{LAYERS}/compressed_tensors/schemes/__init__.py": "",
                f"{LAYERS}/compressed_tensors/schemes/compressed_tensors_w8a16_fp8.py": (
                    "class Scheme:\n    def get_min_capability(cls):\n        return 80\n"
                ),
            },
        )
    )
    assert found.capabilities == {"fp8": 75, "awq": 75, "awq_fast": 75, FP8_COMPRESSED: 80}
    assert (found.architectures, found.cpu_block) == ((), None)


@pytest.mark.parametrize(
    ("body", "expected"), [("[MultipleOf(32)]", 32), ("[16, 32]", None), ("[MultipleOf(n)]", None)]
)
def test_cpu_block_sizes(tmp_path, body, expected):
    source = f"class Backend:\n    @staticmethod\n    def get_supported_kernel_block_sizes():\n        return {body}\n"
    files = {f"vllm/{part}__init__.py": "" for part in ("v1/", "v1/attention/", "v1/attention/backends/")}
    assert limits(package(tmp_path, {**files, "vllm/v1/attention/backends/cpu_attn.py": source})).cpu_block == expected


def test_pytorch_architectures(tmp_path):
    library = tmp_path / "torch/lib/libtorch_python.so"
    assert torch_architectures(tmp_path) == ()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert torch_architectures(tmp_path) == ()
    library.write_bytes(
        b"\x7fELF" + bytes(5000) + b"sm_86\0text sm_1\0" + b"\0sm_75 sm_80 sm_90a compute_90\0" + bytes(99)
    )
    assert torch_architectures(tmp_path) == ("sm_75", "sm_80", "sm_90a", "compute_90")
    library.write_bytes(b"\x7fELF, a build for the CPU alone" + bytes(5000))
    assert torch_architectures(tmp_path) == ()
