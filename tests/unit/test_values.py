"""Standard-library value classes: created, compared and refused like frozen dataclasses."""

from __future__ import annotations

import pickle

import pytest

from vllm_launchers.values import Value, as_dict, replace


class Point(Value):
    x: int
    y: int = 0


class Place(Point):
    name: str = ""


class Other(Value):
    x: int
    y: int = 0


def test_fields_by_position_or_name_with_defaults() -> None:
    assert (Point(1).x, Point(1).y) == (1, 0)
    assert Point(1, 2) == Point(y=2, x=1)
    assert as_dict(Place(1, name="a")) == {"x": 1, "y": 0, "name": "a"}


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})])
def test_invalid_fields_are_refused(args, kwargs) -> None:
    with pytest.raises(TypeError, match="Point"):
        Point(*args, **kwargs)


def test_only_values_of_one_class_are_equal() -> None:
    assert Point(1) == Point(1)
    assert hash(Point(1)) == hash(Point(1, 0))
    assert Point(1) != Point(2)
    assert Point(1) != Other(1)
    assert {Point(1), Point(1, 0)} == {Point(1)}


def test_value_is_immutable_but_replaceable() -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match="immutable"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        del point.x
    assert replace(point, x=2) == Point(2)
    with pytest.raises(TypeError):
        replace(point, z=2)


def test_value_has_a_repr_and_can_be_pickled() -> None:
    assert repr(Point(1)) == "Point(x=1, y=0)"
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)


def test_fields_are_matched_by_position() -> None:
    match Place(1, 2, "a"):
        case Place(x, y, name):
            assert (x, y, name) == (1, 2, "a")
        case _:
            pytest.fail("not matched")
