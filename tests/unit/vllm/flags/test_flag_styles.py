"""Complete packages in the style of a release, including unusual and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, ValueKind
from vllm_launchers.vllm.flags.learn import learn_folder

MakePackage = Callable[..., Path]

GROUP = """
    kwargs = get_kwargs(MadeConfig)
    group = parser.add_argument_group(title="MadeConfig", description=MadeConfig.__doc__)
"""


def test_style_of_0_10_is_read(tmp_path: Path, write_files: Callable[..., Path]) -> None:
    fields = "".join(f"    filler_{number}: bool = False\n" for number in range(30))
    files = {
        "config.py": "from typing import Literal, Optional, Union\nfrom pydantic.dataclasses import dataclass\n"
        "def config(cls):\n    return cls\n"
        "BlockSize = Literal[1, 8, 16]\n"
        "@config\n@dataclass\nclass CacheConfig:\n"
        "    block_size: Optional[BlockSize] = None  # type: ignore\n"
        '    """Size of a block."""\n'
        "    swap: Union[str, dict[str, str]] = 'none'\n" + fields,
        "engine/arg_utils.py": """
            from typing import Optional, Union
            from vllm.config import CacheConfig

            def optional_type(return_type):
                return return_type

            def get_kwargs(cls):
                human_readable_ints = {"max_model_len"}

            class EngineArgs:
                block_size: Optional[int] = CacheConfig.block_size

                @staticmethod
                def add_cli_args(parser):
                    cache_kwargs = get_kwargs(CacheConfig)
                    cache_group = parser.add_argument_group(title="CacheConfig")
                    for key in cache_kwargs:
                        cache_group.add_argument(f"--{key.replace('_', '-')}", **cache_kwargs[key])
                    parser.add_argument('--disable-log-stats', action='store_true', help='No statistics.')
                    return parser

            class AsyncEngineArgs(EngineArgs):
                @staticmethod
                def add_cli_args(parser, async_args_only=False):
                    if not async_args_only:
                        parser = EngineArgs.add_cli_args(parser)
                    return parser
        """,
        "entrypoints/openai/cli_args.py": """
            import json
            import ssl
            from dataclasses import field
            from typing import Optional
            from vllm.config import config
            from vllm.engine.arg_utils import AsyncEngineArgs, optional_type

            class LoRAParserAction(argparse.Action):
                pass

            @config
            @dataclass
            class FrontendArgs:
                port: int = 8000
                lora_modules: Optional[list[str]] = None
                ssl_cert_reqs: int = int(ssl.CERT_NONE)
                middleware: list[str] = field(default_factory=lambda: [])

                @staticmethod
                def add_cli_args(parser):
                    from vllm.engine.arg_utils import get_kwargs

                    frontend_kwargs = get_kwargs(FrontendArgs)
                    frontend_kwargs["lora_modules"]["type"] = optional_type(str)
                    frontend_kwargs["lora_modules"]["action"] = LoRAParserAction
                    frontend_kwargs["middleware"]["action"] = "append"
                    if "nargs" in frontend_kwargs["middleware"]:
                        del frontend_kwargs["middleware"]["nargs"]
                    group = parser.add_argument_group(title="Frontend", description=FrontendArgs.__doc__)
                    for key, value in frontend_kwargs.items():
                        group.add_argument(f"--{key.replace('_', '-')}", **value)
                    return parser

            def make_arg_parser(parser):
                parser.add_argument("model_tag", type=str, nargs="?")
                parser = FrontendArgs.add_cli_args(parser)
                parser = AsyncEngineArgs.add_cli_args(parser)
                return parser
        """,
    }
    flags = learn_folder(write_files(tmp_path / "vllm", files)).flags
    assert (flags["block-size"].kind, flags["block-size"].choices) == (ValueKind.INT, ("1", "8", "16"))
    assert flags["block-size"].help == "Size of a block."
    assert flags["swap"].kind is ValueKind.OTHER
    assert (flags["port"].default, flags["port"].group) == ("8000", "Frontend")
    assert flags["ssl-cert-reqs"].default == "0"
    assert (flags["lora-modules"].many, flags["lora-modules"].nullable) == (True, True)
    assert (flags["middleware"].many, flags["middleware"].default) == (True, "[]")
    assert not flags["disable-log-stats"].negatable


def test_style_of_0_33_is_read(made_files: dict[str, str], tmp_path: Path, write_files: Callable[..., Path]) -> None:
    files = dict(made_files)
    del files["entrypoints/openai/cli_args.py"]
    files["utils/argparse_utils.py"] = "class EnableDisableAction(BooleanOptionalAction):\n    pass\n"
    files["entrypoints/common/limits.py"] = "MOST = 4 * 1024\n"
    files["entrypoints/common/cli_args.py"] = """
        from vllm.config.utils import config
        from vllm.engine.arg_utils import AsyncEngineArgs
        from .limits import MOST

        @config
        class BaseFrontendArgs:
            template: str | None = None
            enable_thing: bool = False

            @classmethod
            def _customize_cli_kwargs(cls, frontend_kwargs):
                frontend_kwargs["template"]["default"] = "plain"
                return frontend_kwargs

            @classmethod
            def add_cli_args(cls, parser):
                from vllm.engine.arg_utils import get_kwargs

                frontend_kwargs = get_kwargs(cls)
                frontend_kwargs = cls._customize_cli_kwargs(frontend_kwargs)
                group_name = cls.__name__.replace("Args", "")
                frontend_group = parser.add_argument_group(title=group_name, description=cls.__doc__)
                for key, value in frontend_kwargs.items():
                    extra_flags = value.pop("flags", [])
                    frontend_group.add_argument(*extra_flags, f"--{key.replace('_', '-')}", **value)
                return parser

        @config
        class FrontendArgs(BaseFrontendArgs):
            most: int = MOST

            @classmethod
            def _customize_cli_kwargs(cls, frontend_kwargs):
                frontend_kwargs = super()._customize_cli_kwargs(frontend_kwargs)
                frontend_kwargs["most"]["flags"] = ["-m"]
                return frontend_kwargs

        def make_arg_parser(parser):
            parser = FrontendArgs.add_cli_args(parser)
            return AsyncEngineArgs.add_cli_args(parser)
    """
    flags = learn_folder(write_files(tmp_path / "vllm", files)).flags
    assert (flags["template"].default, flags["template"].group) == ("plain", "Frontend")
    assert (flags["most"].default, flags["most"].aliases) == ("4096", ("-m",))
    assert flags["enable-thing"].opposite == "disable-thing"
    assert flags["speed"].opposite == ""


def test_device_is_a_choice_if_the_build_supports_it(make_package: MakePackage) -> None:
    registration = """
    parser.add_argument("--place", default="auto", choices=["auto"] + (
        [current_platform.device_type] if current_platform.device_type not in ("", "cpu") else []))
    """
    more = {"platforms/__init__.py": "if TYPE_CHECKING:\n    current_platform: Platform\n"}
    folder = make_package("@config\nclass MadeConfig:\n    x: int = 1\n", registration, more)
    path = folder / "engine/arg_utils.py"
    path.write_text("from vllm.platforms import current_platform\n" + path.read_text())
    choices = {
        build: learn_folder(folder, build=build).flags["place"].choices for build in ("cpu", "cuda", "rocm", None)
    }
    assert choices == {"cpu": ("auto",), "cuda": ("auto", "cuda"), "rocm": ("auto", "cuda"), None: ()}


@pytest.mark.parametrize(
    "damage",
    [
        {"entrypoints/openai/cli_args.py": "def make_arg_parser(parser:\n"},
        {"entrypoints/openai/cli_args.py": "make_arg_parser = None\n"},
        {"engine/arg_utils.py": "\0"},
        {"engine/arg_utils.py": "x = " + "-" * 3 + "(" * 5000},
    ],
)
def test_unreadable_source_is_reported(
    made_files: dict[str, str], damage: dict[str, str], tmp_path: Path, write_files: Callable[..., Path]
) -> None:
    folder = write_files(tmp_path / "vllm", {**made_files, **damage})
    with pytest.raises(FlagsUnknownError, match=str(folder)):
        learn_folder(folder)


def test_circular_definitions_terminate(make_package: MakePackage) -> None:
    config = """
        from vllm.config.round import Back
        A = B
        B = A
        Loop = Loop | int

        @config
        class MadeConfig(Back):
            x: Loop = A
            y: Back = None
    """
    more = {"config/round.py": "from vllm.config.made import Back\n"}
    registration = GROUP + '    group.add_argument("--x", **kwargs["x"])\n    group.add_argument("--y", **kwargs["y"])'
    assert learn_folder(make_package(config, registration, more)).flags["x"].default is None
