from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.flags.check_value import problem
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.learn import learn_folder

MakePackage = Callable[..., Path]

GROUP = """
    kwargs = get_kwargs(MadeConfig)
    group = parser.add_argument_group(title="MadeConfig", description=MadeConfig.__doc__)
"""


@pytest.fixture
def one(make_package: MakePackage) -> Callable[..., FlagSpec]:
    """The flag ``--x`` of a field ``x`` declared by the given lines."""

    def one(field: str, call: str = 'group.add_argument("--x", **kwargs["x"])', *, before: str = "") -> FlagSpec:
        lines = "".join(f"    {line}\n" for line in field.splitlines())
        config = f'{before}\n@config\nclass MadeConfig:\n    """Made."""\n{lines}'
        return learn_folder(make_package(config, GROUP + f"\n    {call}\n")).flags["x"]

    return one


@pytest.mark.parametrize(
    ("field", "kind", "default"),
    [
        ("x: int = 7", ValueKind.INT, "7"),
        ("x: int | None = None", ValueKind.INT, None),
        ("x: float = 0.5", ValueKind.FLOAT, "0.5"),
        ("x: float = -0.5", ValueKind.FLOAT, "-0.5"),
        ("x: int = 4 * 2**20", ValueKind.INT, "4194304"),
        ("x: str = 'auto'", ValueKind.TEXT, "auto"),
        ("x: str = ''", ValueKind.TEXT, ""),
        ("x: bool = True", ValueKind.BOOL, "true"),
        ("x: bool | None = None", ValueKind.BOOL, None),
        ("x: dict[str, Any] = field(default_factory=dict)", ValueKind.JSON, "{}"),
        ("x: dict[str, Any] | None = None", ValueKind.JSON, None),
        ("x: dict[str, str] | str = 'cpu'", ValueKind.OTHER, "cpu"),
        ("x: type[object] | str | None = None", ValueKind.TEXT, None),
    ],
)
def test_field_type_and_default_become_the_flags(
    one: Callable[..., FlagSpec], field: str, kind: ValueKind, default: str | None
) -> None:
    spec = one(field)
    assert (spec.kind, spec.default, spec.group) == (kind, default, "MadeConfig")


def test_class_made_of_a_dictionary_is_json(one: Callable[..., FlagSpec]) -> None:
    made = "class Plain(dict):\n    pass\nclass Typed(dict[str, int]):\n    pass\nclass Own(Typed):\n    pass\n"
    for name in ("Plain", "Typed", "Own"):
        assert one(f"x: {name} = field(default_factory={name})", before=made).kind is ValueKind.JSON


def test_only_a_two_way_switch_has_a_no_form(one: Callable[..., FlagSpec]) -> None:
    assert one("x: bool = False").negatable
    assert not one("x: bool = False", 'group.add_argument("--x", action="store_true")').negatable
    assert one("x: bool = False", 'group.add_argument("--x", action="store_true")').default == "false"


def test_lists_take_several_values_and_state_their_type(one: Callable[..., FlagSpec]) -> None:
    numbers = one("x: list[int] | None = None")
    assert (numbers.kind, numbers.many, numbers.nullable) == (ValueKind.INT, True, True)
    mixed = one("x: list[int | str] = field(default_factory=list)")
    assert (mixed.kind, mixed.many, mixed.default) == (ValueKind.TEXT, True, "[]")
    assert one("x: set[str] = field(default_factory=set)").many
    assert one("x: tuple[str, ...] = ('a', 'b')").many


def test_literal_values_are_choices_wherever_defined(make_package: MakePackage) -> None:
    config = """
        from typing import get_args
        from vllm.config.words import Speed, Level

        Own = Literal["b", "a"]

        @config
        class MadeConfig:
            own: Own = "a"
            far: Speed | None = None
            nested: Literal["x", Speed] = "x"
            level: Level = 2
            several: list[Speed] | None = None
            open: Own | str = "a"
    """
    registration = GROUP + "\n".join(
        f'    group.add_argument("--{name}", **kwargs["{name}"])'
        for name in ("own", "far", "nested", "level", "several", "open")
    )
    registration += '\n    group.add_argument("--again", choices=list(get_args(Speed)) + ["more"], type=str)'
    words = 'from typing import Literal\nSpeed = Literal["slow", "fast"]\nLevel = Literal[8, 2, 16]\n'
    folder = make_package(config, registration, {"config/words.py": words})
    path = folder / "engine/arg_utils.py"
    path.write_text("from typing import get_args\nfrom vllm.config.words import Speed\n" + path.read_text())
    flags = learn_folder(folder).flags
    assert flags["own"].choices == ("a", "b")
    assert flags["far"].choices == ("fast", "slow")
    assert flags["far"].nullable
    assert flags["nested"].choices == ("fast", "slow", "x")
    assert (flags["level"].kind, flags["level"].choices) == (ValueKind.INT, ("2", "8", "16"))
    assert (flags["several"].choices, flags["several"].many) == (("fast", "slow"), True)
    assert (flags["open"].choices, flags["open"].words) == ((), ("a", "b"))
    assert flags["again"].choices == ("slow", "fast", "more")


def test_enum_gives_words_and_default(one: Callable[..., FlagSpec]) -> None:
    before = "from enum import Enum\nclass Backend(Enum):\n    FLASH = 'package.module.Flash'\n    PLAIN = 'plain'\n"
    spec = one("x: Backend | None = Backend.FLASH", before=before)
    assert (spec.kind, spec.words, spec.closed, spec.default) == (ValueKind.TEXT, ("FLASH", "plain"), True, "FLASH")
    assert not one("x: Backend | str = Backend.PLAIN", before=before).closed
    assert (
        one("x: str = 'plain'", 'group.add_argument("--x", choices=[b.value for b in Backend])', before=before).choices
        == ()
    )


@pytest.mark.parametrize(
    ("field", "bounds"),
    [
        ("x: int = Field(default=1, ge=1)", (1, None, None, None)),
        ("x: float = Field(default=0.9, gt=0, le=1)", (None, 0, 1, None)),
        ("x: float = Field(0.0, ge=0.0, lt=1.0)", (0, None, None, 1)),
        ("x: Annotated[int, Field(ge=2)] = 4", (2, None, None, None)),
        ("LEAST: ClassVar[int] = 5\nx: int | None = Field(default=None, ge=LEAST)", (5, None, None, None)),
        ("x: int = 3", (None, None, None, None)),
    ],
)
def test_pydantic_bounds_are_known(one: Callable[..., FlagSpec], field: str, bounds: tuple[float | None, ...]) -> None:
    spec = one(field)
    assert (spec.minimum, spec.above, spec.maximum, spec.below) == bounds


def test_help_is_the_text_after_the_field(one: Callable[..., FlagSpec]) -> None:
    spec = one('x: int = 1\n"""Uses 90% of it.\n\n    - a point\n"""\ny: int = 2')
    assert spec.help == "Uses 90% of it.\n\n- a point"
    assert one("x: int = 1").help == ""


def test_human_readable_numbers_are_recognized_by_their_parser(make_package: MakePackage) -> None:
    names = ("max_model_len", "max_num_batched_tokens", "cache_bytes", "other")
    fields = "\n".join(f"    {name}: int | None = None" for name in names)
    calls = "\n".join(f'    group.add_argument("--{n.replace("_", "-")}", **kwargs["{n}"])' for n in names)
    flags = learn_folder(make_package(f"@config\nclass MadeConfig:\n{fields}\n", GROUP + calls)).flags
    assert flags["max-model-len"].kind is ValueKind.HUMAN_INT
    assert flags["max-model-len"].words == ("auto", "-1")
    assert (flags["cache-bytes"].kind, flags["cache-bytes"].words) == (ValueKind.HUMAN_INT, ())
    assert flags["max-num-batched-tokens"].kind is ValueKind.HUMAN_INT
    assert flags["other"].kind is ValueKind.INT


def test_modified_keyword_arguments_are_followed(one: Callable[..., FlagSpec]) -> None:
    assert one("x: int = 5", 'group.add_argument("--x", **{**kwargs["x"], "default": None})').default is None
    removed = 'kwargs["x"]["choices"].remove("b"); group.add_argument("--x", **kwargs["x"])'
    assert one('x: Literal["a", "b"] = "a"', removed.replace("; ", "\n    ")).choices == ("a",)
    as_json = (
        'kwargs["x"]["type"] = json.loads\n    del kwargs["x"]["nargs"]\n    group.add_argument("--x", **kwargs["x"])'
    )
    spec = one('x: list[str] = field(default_factory=lambda: ["*"])', as_json)
    assert (spec.kind, spec.many, spec.default) == (ValueKind.JSON_LIST, False, '["*"]')
    conditional = (
        'if "nargs" in kwargs["x"]:\n        del kwargs["x"]["nargs"]\n    group.add_argument("--x", **kwargs["x"])'
    )
    assert not one("x: list[str] | None = None", conditional).many


def test_aliases_destinations_and_deprecation_are_kept(one: Callable[..., FlagSpec]) -> None:
    spec = one("x: int = 1", 'group.add_argument("--x", "-x", "--ex", dest="x", deprecated=True, **kwargs["x"])')
    assert spec.aliases == ("-x", "--ex")
    assert spec.deprecated
    assert one("x: int = 1", 'group.add_argument("--x", type=int, help="[DEPRECATED] use --y")').deprecated
    assert not one("x: int = 1").deprecated


def test_manual_flags_get_bounds_and_words_of_their_field(one: Callable[..., FlagSpec]) -> None:
    assert one("x: int = Field(default=0, ge=0)", 'group.add_argument("--x", type=int)').minimum == 0
    spec = one('x: Literal["mp", "ray"] = "mp"', 'group.add_argument("--x", type=str, default="mp")')
    assert (spec.choices, spec.words, spec.closed) == ((), ("mp", "ray"), True)


def test_json_flag_knows_the_keys_of_its_class(one: Callable[..., FlagSpec]) -> None:
    inner = (
        '@config\nclass Inner:\n    depth: int = 2\n    """How deep."""\n    own: int = field(default=0, init=False)\n'
    )
    spec = one("x: Inner = field(default_factory=Inner)", before=inner)
    assert (spec.kind, spec.default) == (ValueKind.JSON, None)
    assert [(part.name, part.default, part.help) for part in spec.parts] == [("depth", "2", "How deep.")]
    lenient = "from dataclasses import dataclass\n@dataclass\nclass Inner:\n    depth: int = 2\n"
    assert one("x: Inner | None = None", before=lenient).parts == ()


def test_flag_without_a_required_value_is_bare(one: Callable[..., FlagSpec]) -> None:
    spec = one("x: bool | str | None = None")
    assert (spec.kind, spec.bare, spec.many) == (ValueKind.TEXT, True, False)
    assert one("x: str = 'a'", 'group.add_argument("--x", type=str, nargs="?", const=True)').bare


def test_custom_parser_accepts_any_text(one: Callable[..., FlagSpec]) -> None:
    assert one("x: int = 1", 'group.add_argument("--x", type=lambda s: s.split(","))').kind is ValueKind.OTHER
    unknown = 'group.add_argument("--x", choices=["a"] + names_of_this_machine(), default="a")'
    assert one("x: int = 1", unknown).choices == ()


def test_flag_that_is_not_understood_accepts_anything(one: Callable[..., FlagSpec]) -> None:
    spec = one("x: int = 1", 'group.add_argument("--x", **made_elsewhere("x"))')
    assert (spec.kind, spec.bare, spec.negatable, spec.choices) == (ValueKind.OTHER, True, True, ())
    table = FlagTable("0.40.0", "installation", {"x": spec})
    for value in (True, False, 1, 0.5, "text", ""):
        assert problem(table, "x", value) is None


def test_fields_of_base_classes_are_flags_too(make_package: MakePackage) -> None:
    config = """
        @config
        class Base:
            near: int = 1
            far: int = 2

        @config
        class MadeConfig(Base):
            near: int = 9
    """
    registration = (
        GROUP + '    group.add_argument("--near", **kwargs["near"])\n    group.add_argument("--far", **kwargs["far"])'
    )
    flags = learn_folder(make_package(config, registration)).flags
    assert (flags["near"].default, flags["far"].default) == ("9", "2")


def test_type_checking_only_values_are_offered_but_not_required(make_package: MakePackage) -> None:
    config = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vllm.loading import Formats
        else:
            Formats = str

        @config
        class MadeConfig:
            load_format: str | Formats = "auto"
    """
    registration = GROUP + '    group.add_argument("--load-format", **kwargs["load_format"])'
    more = {"loading.py": 'from typing import Literal\nFormats = Literal["auto", "dummy"]\n'}
    spec = learn_folder(make_package(config, registration, more)).flags["load-format"]
    assert (spec.kind, spec.choices, spec.words, spec.closed) == (ValueKind.TEXT, (), ("auto", "dummy"), False)


def test_variables_are_read_and_the_parser_is_not_a_flag(make_package: MakePackage) -> None:
    table = learn_folder(make_package("@config\nclass MadeConfig:\n    x: int = 1\n", GROUP), version="0.30.0")
    assert table.variables == {"VLLM_LOGGING_LEVEL", "VLLM_MADE_UP"}
    assert (table.version, table.source) == ("0.30.0", "installation")
    assert {"headless", "enable-log-requests", "filler-0"} <= set(table.flags)
    assert not {"model-tag", "model_tag", "help"} & set(table.flags)


def test_parser_names_come_from_their_registries(make_package: MakePackage) -> None:
    registry = '_TOOL_PARSERS_TO_REGISTER = {\n    "hermes": ("file", "Class"),\n    "alpha": ("file", "Class"),\n}\n'
    registration = '    parser.add_argument("--tool-call-parser", type=str)'
    config = "@config\nclass MadeConfig:\n    x: int = 1\n"
    flags = learn_folder(make_package(config, registration, {"tool_parsers/__init__.py": registry})).flags
    assert flags["tool-call-parser"].words == ("alpha", "hermes")
