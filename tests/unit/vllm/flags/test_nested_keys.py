"""Keys of JSON flags: what is learned from configuration classes, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.check_nested import part_at
from vllm_launchers.vllm.flags.check_value import problem, refused_together
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.learn import learn_folder
from vllm_launchers.vllm.flags.releases import RELEASES, release_table

CLASSES = """
    import enum
    from pydantic import BeforeValidator, SkipValidation, field_validator, model_validator

    Half = Literal["read", "both"]
    Role = Literal[Half, "write"]

    class Mode(enum.IntEnum):
        NONE = 0
        FULL = 2

    class Pair(enum.Enum):
        ONE = 1
        TWO = (1, 2)

    class Kind(str, enum.Enum):
        PLAIN = "plain"
        FANCY = "fancy"

    @config
    class Passes:
        fuse: bool | None = None
        size: int = Field(default=1, ge=1)

    @config
    class Inner:
        backend: Literal["auto", "xgrammar", "guidance"] = "auto"
        role: Role | None = None
        version: Literal[2, 3] | None = None
        mode: Mode | None = None
        pair: Pair = Pair.ONE
        kind: Kind = Kind.PLAIN
        moe: Literal["auto", "deep_gemm"] = "auto"
        strict: bool = False
        steps: int = Field(default=4, gt=0)
        share: float | None = Field(default=None, ge=0, le=1)
        name: str = ""
        sizes: list[int] | None = None
        extra: dict[str, Any] = field(default_factory=dict)
        passes: Passes = field(default_factory=Passes)
        anything: Any = None
        several: int | str = 1
        later: int = 1
        own: int = 1
        read: Annotated[int, BeforeValidator(int)] = 1
        skipped: SkipValidation[int] = 1

        @field_validator("mode", mode="before")
        @classmethod
        def parse_mode(cls, value):
            if isinstance(value, str):
                value = Mode[value.upper()]
            return value

        @field_validator("pair", mode="before")
        @classmethod
        def parse_pair(cls, value):
            if isinstance(value, str):
                if value.lower() == "auto":
                    return None
                return Pair[value.upper()]
            return value

        @field_validator("moe", mode="before")
        @classmethod
        def parse_moe(cls, value):
            if isinstance(value, str):
                return value.lower().replace("-", "_")
            return value

        @field_validator("passes", mode="before")
        @classmethod
        def parse_passes(cls, value):
            if isinstance(value, dict):
                return Passes(**value)
            return value

        @field_validator("own", mode="before")
        @classmethod
        def parse_own(cls, value):
            return count(value)

        @field_validator("later", "mode", mode="wrap")
        @classmethod
        def skip_none(cls, value, handler):
            if value is None:
                return value
            return handler(value)

        @field_validator("name")
        @classmethod
        def check_name(cls, value):
            return value

    @config
    class Rewritten:
        depth: int = 1

        @model_validator(mode="before")
        @classmethod
        def rename(cls, data):
            data.pop("old", None)
            return data

    @config
    class Copied:
        depth: int = 1

        @model_validator(mode="before")
        @classmethod
        def rename(cls, data):
            return {**data, "depth": 2}

    @config
    class Rejecting:
        depth: int = 1

        @model_validator(mode="before")
        @classmethod
        def reject(cls, data):
            if "old" in data:
                raise ValueError("old is gone")
            return data

    @config
    class MadeConfig:
        inner: Inner = field(default_factory=Inner)
        rewritten: Rewritten = field(default_factory=Rewritten)
        copied: Copied = field(default_factory=Copied)
        rejecting: Rejecting = field(default_factory=Rejecting)
"""
FLAGS = """
    made_kwargs = get_kwargs(MadeConfig)
    made_group = parser.add_argument_group(title="MadeConfig", description=MadeConfig.__doc__)
    made_group.add_argument("--inner", **made_kwargs["inner"])
    made_group.add_argument("--rewritten", **made_kwargs["rewritten"])
    made_group.add_argument("--copied", **made_kwargs["copied"])
    made_group.add_argument("--rejecting", **made_kwargs["rejecting"])
"""


@pytest.fixture
def learned(make_package: Callable[..., Path]) -> FlagTable:
    return learn_folder(make_package(CLASSES, FLAGS), version="0.32.0")


GOOD: list[tuple[str, FlagValue]] = [
    ("inner", "{}"),
    ("inner", '{"backend": "xgrammar", "role": "write", "strict": true, "steps": 3}'),
    ("inner", '{"role": null, "version": 3, "mode": "full", "sizes": null, "passes": {"fuse": null}}'),
    ("inner", '{"mode": 2, "later": null, "several": "x", "anything": [1], "own": "x", "read": "x", "skipped": "x"}'),
    ("inner", '{"moe": "Deep-Gemm", "pair": "auto", "kind": "fancy", "extra": {"x": 1}}'),
    ("inner", '{"steps": "3", "strict": "yes", "share": 1, "sizes": ["x"]}'),
    ("inner", '{"steps": 4k, "share": true, "strict": 0}'),
    ("inner.backend", "guidance"),
    ("inner.steps", "4k"),
    ("inner.strict", False),
    ("inner.sizes", "[1, 2]"),
    ("inner.sizes+", "1,2"),
    ("inner.passes.size", 2),
    ("inner.passes", '{"size": 2}'),
    ("inner.role", "null"),
    ("rewritten", '{"old": 1}'),
    ("copied", '{"old": 1}'),
    ("rejecting", '{"depth": 2}'),
]

BAD: list[tuple[str, FlagValue, str]] = [
    ("inner", '{"backend": "nonsense"}', "--inner.backend takes auto, xgrammar or guidance, not 'nonsense'"),
    ("inner", '{"backend": "XGRAMMAR"}', "not 'XGRAMMAR'; did you mean xgrammar?"),
    ("inner", '{"backend": 3}', "--inner.backend takes auto, xgrammar or guidance, not 3"),
    ("inner", '{"backend": null}', "not null"),
    ("inner", '{"role": "wite"}', "--inner.role takes read, both or write, not 'wite'; did you mean write?"),
    ("inner", '{"version": 5}', "--inner.version takes 2 or 3, not 5"),
    ("inner", '{"version": "3"}', "--inner.version takes 2 or 3, not '3'"),
    ("inner", '{"mode": "FUL"}', "--inner.mode takes NONE or FULL, not 'FUL'; did you mean FULL?"),
    ("inner", '{"mode": 1}', "--inner.mode takes NONE or FULL, not 1"),
    ("inner", '{"pair": "three"}', "--inner.pair takes ONE, TWO or auto, not 'three'"),
    ("inner", '{"kind": "FANCY"}', "--inner.kind takes plain or fancy, not 'FANCY'; did you mean fancy?"),
    ("inner", '{"moe": "deep"}', "--inner.moe takes auto or deep_gemm, not 'deep'"),
    ("inner", '{"strict": "maybe"}', "--inner.strict takes true or false, not 'maybe'"),
    ("inner", '{"strict": 2}', "takes true or false, not 2"),
    ("inner", '{"steps": 1.5}', "--inner.steps takes a whole number, not 1.5"),
    ("inner", '{"steps": "many"}', "not 'many'"),
    ("inner", '{"steps": 0}', "--inner.steps must be above 0, not '0'"),
    ("inner", '{"share": 2}', "--inner.share must be 1 or less"),
    ("inner", '{"name": 5}', "--inner.name takes text, not 5"),
    ("inner", '{"sizes": 5}', "--inner.sizes takes a list, not 5"),
    ("inner", '{"extra": "x"}', "--inner.extra takes an object, not 'x'"),
    ("inner", '{"passes": {"fuze": true}}', "--inner.passes has no key 'fuze' (it has fuse, size); did you mean fuse?"),
    ("inner", '{"passes": {"size": 0}}', "--inner.passes.size must be 1 or more"),
    ("inner", '{"bakend": "auto"}', "--inner has no key 'bakend'"),
    ("rejecting", '{"deep": 1}', "--rejecting has no key 'deep'"),
    ("inner.backend", "guidence", "did you mean guidance?"),
    ("inner.name", 5, "--inner.name takes text, not 5"),
    ("inner.passes.fuze", True, "--inner.passes has no key 'fuze'"),
    ("inner.sizes", 8, "takes a list, not 8"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_values_accepted_by_the_classes_have_no_problem(learned: FlagTable, name: str, value: FlagValue) -> None:
    assert problem(learned, name, value) is None


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_values_refused_by_the_classes_are_reported(
    learned: FlagTable, name: str, value: FlagValue, words: str
) -> None:
    assert words in (problem(learned, name, value) or "")


def test_key_is_found_by_its_path(learned: FlagTable) -> None:
    inner = learned.flags["inner"]
    fuse = part_at(inner, "passes.fuse")
    assert fuse is not None
    assert fuse.kind is ValueKind.BOOL
    assert part_at(inner, "passes.fuze") is None
    assert part_at(inner, "nothing.fuse") is None


def test_connectors_are_learned_from_their_registry(make_package: Callable[..., Path]) -> None:
    classes = """
    @config
    class Transfer:
        kv_connector: str | None = None

    @config
    class MadeConfig:
        kv_transfer_config: Transfer | None = None
    """
    flags = """
    made_kwargs = get_kwargs(MadeConfig)
    made_group = parser.add_argument_group(title="MadeConfig", description=MadeConfig.__doc__)
    made_group.add_argument("--kv-transfer-config", **made_kwargs["kv_transfer_config"])
    """
    registry = """
    class Factory:
        @classmethod
        def register_connector(cls, name, module_path, class_name):
            ...

    Factory.register_connector("OneConnector", "vllm.one", "OneConnector")
    Factory.register_connector("OtherConnector", "vllm.other", "OtherConnector")
    """
    more = {"distributed/kv_transfer/kv_connector/factory.py": registry}
    spec = learn_folder(make_package(classes, flags, more)).flags["kv-transfer-config"]
    assert [(part.name, part.words) for part in spec.parts] == [("kv_connector", ("OneConnector", "OtherConnector"))]


def test_speculative_keys_may_have_hyphens(make_table: Callable[..., FlagTable]) -> None:
    parts = (FlagSpec("num_speculative_tokens", ValueKind.INT, above=0), FlagSpec("method", ValueKind.TEXT))
    table = make_table(FlagSpec("speculative-config", ValueKind.JSON, parts=parts))
    assert problem(table, "speculative-config", '{"num-speculative-tokens": 3}') is None
    assert "must be above 0" in (problem(table, "speculative-config", '{"num-speculative-tokens": 0}') or "")


def test_null_is_ignored_by_a_flag_without_a_class(make_table: Callable[..., FlagTable]) -> None:
    table = make_table(
        FlagSpec("speculative-config", ValueKind.JSON, nullable=True, parts=(FlagSpec("method", ValueKind.TEXT),)),
        FlagSpec("spec-tokens", ValueKind.INT),
        FlagSpec("spec-model", ValueKind.TEXT),
        FlagSpec("limit-mm-per-prompt", ValueKind.JSON, group="MultiModalConfig"),
        FlagSpec("compilation-config", ValueKind.JSON),
    )
    assert problem(table, "speculative-config", "null") is None
    assert problem(table, "limit-mm-per-prompt", "null") is None
    assert problem(table, "compilation-config", "null") is not None
    assert refused_together(table, {"speculative-config": "null", "spec-tokens": 2}) != []


def test_object_is_ignored_next_to_separate_keys(
    make_table: Callable[..., FlagTable],
) -> None:
    parts = tuple(
        FlagSpec(name, ValueKind.TEXT, nullable=True) for name in ("profiler", "torch_profiler_dir", "proton_mode")
    )
    table = make_table(FlagSpec("profiler-config", ValueKind.JSON, parts=parts))
    complete = {"profiler-config": '{"profiler": "torch", "torch_profiler_dir": "/t"}'}
    assert refused_together(table, complete) == []
    assert refused_together(table, {**complete, "profiler-config.profiler": "torch"}) != []


def test_auto_attention_backend_is_not_set_twice(make_table: Callable[..., FlagTable]) -> None:
    backend = FlagSpec("backend", ValueKind.OTHER, words=("FLASH_ATTN", "auto"), closed=True, nullable=True)
    table = make_table(
        FlagSpec("attention-backend", ValueKind.TEXT), FlagSpec("attention-config", ValueKind.JSON, parts=(backend,))
    )
    flags = {"attention-backend": "FLASH_ATTN"}
    assert refused_together(table, {**flags, "attention-config.backend": "auto"}) == []
    assert refused_together(table, {**flags, "attention-config": '{"backend": "AUTO"}'}) == []
    assert refused_together(table, {**flags, "attention-config.backend": "FLASH_ATTN"}) != []
    whole = {**flags, "attention-config": '{"backend": "FLASH_ATTN"}'}
    assert refused_together(table, whole) != []
    assert refused_together(table, {**whole, "attention-config.backend": "null"}) == []


def test_key_may_need_all_64_bits(make_table: Callable[..., FlagTable]) -> None:
    table = make_table(FlagSpec("watermark-config", ValueKind.JSON, parts=(FlagSpec("key", ValueKind.INT, minimum=0),)))
    assert problem(table, "watermark-config.key", str(2**64 - 1)) is None
    assert "below 2^64" in (problem(table, "watermark-config.key", str(2**64)) or "")


@pytest.mark.parametrize("release", RELEASES)
def test_unknown_keys_of_a_release_are_not_reported(release: str) -> None:
    table = release_table(release)
    for name in ("compilation-config", "kv-transfer-config", "structured-outputs-config"):
        if name in table.flags:
            assert problem(table, name, '{"made_up": "nonsense"}') is None
