"""Parses JSON values into the types of vLLM's request models, and rejects invalid ones with pydantic's messages.

vLLM 0.32 builds the message for a malformed body from pydantic's list of errors (``validation_exception_handler``): one
line per error with ``type``, ``loc``, ``msg`` and ``input``, at most ten of them, with long inputs shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

MOST_ERRORS = 10
MOST_INPUT = 200
MOST_ERROR = 1000
INT64_MAX = 2**63 - 1

Place = tuple[str | int, ...]
Reader = Callable[[Any, Place, "Errors"], Any]
"""Converts a value to its field's type, or records why it can't."""


class ApiError(Exception):
    """A response other than 200, in vLLM's error format."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": sanitized(message), "type": kind, "param": param, "code": status}
        self.body: dict[str, Any] = {"error": error}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 with the wording of vLLM's handlers."""
    return ApiError(400, "BadRequestError", message, param)


def invalid(message: str, param: str | None = None, value: object = None) -> ApiError:
    """A 400 from vLLM's own checks: what is wrong, then the parameter and its value."""
    details = [f"parameter={param}"] if param is not None else []
    details += [f"value={value}"] if value is not None else []
    return bad_request(f"{message} ({', '.join(details)})" if details else message, param)


def not_modeled(what: str, param: str | None = None) -> ApiError:
    """A 400 for features that real vLLM supports but a simulation can't honestly offer."""
    return bad_request(f"The simulated engine does not model {what}.", param)


def sanitized(message: str) -> str:
    """The message without file paths and addresses, which vLLM removes from every error."""
    message = re.sub(r" at 0x[0-9a-fA-F]+>", ">", message)
    message = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", message)
    return re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", message).strip()


@dataclass(slots=True)
class Errors:
    """A body's errors, in the order of its model's fields."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, place: Place, message: str, value: object, **context: object) -> None:
        """Add one error."""
        error: dict[str, Any] = {"type": kind, "loc": place, "msg": message, "input": value}
        if context:
            error["ctx"] = context
        self.found.append(error)

    def refuse(self) -> None:
        """Raise `ApiError` if there are errors."""
        if self.found:
            raise self.rejection()

    def rejection(self) -> ApiError:
        """The response to a body with these errors."""
        return ApiError(400, "Bad Request", self._message(), ".".join(str(part) for part in self.found[0]["loc"]))

    def _message(self) -> str:
        count = len(self.found)
        label = "error" if count == 1 else "errors"
        lines = [f"{count} validation {label}:", *(f"  {_error_text(error)}" for error in self.found[:MOST_ERRORS])]
        if count > MOST_ERRORS:
            lines.append(f"  ...and {count - MOST_ERRORS} more {label}")
        return "\n".join(lines)


def _error_text(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    text = str({**error, "loc": place, "input": _described(error["input"])})
    return text if len(text) <= MOST_ERROR else f"{text[:MOST_ERROR]}...[truncated]"


def _described(value: object) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MOST_INPUT else f"{text[:MOST_INPUT]}...[truncated]"


def anything(value: Any, _place: Place, _errors: Errors) -> Any:
    """Accept anything."""
    return value


def string(value: Any, place: Place, errors: Errors) -> Any:
    """A string."""
    if not isinstance(value, str):
        errors.add("string_type", place, "Input should be a valid string", value)
    return value


def bounded_string(most: int) -> Reader:
    """A string of 1 to ``most`` characters."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        if not isinstance(value, str):
            return string(value, place, errors)
        if not value:
            errors.add("string_too_short", place, "String should have at least 1 character", value, min_length=1)
        elif len(value) > most:
            errors.add(
                "string_too_long", place, f"String should have at most {most} characters", value, max_length=most
            )
        return value

    return read


def boolean(value: Any, place: Place, errors: Errors) -> Any:
    """A boolean as pydantic parses it: also 1, 0 and a few words."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        known = _BOOLEANS.get(value.strip().lower() if isinstance(value, str) else value)
        if known is None:
            errors.add("bool_parsing", place, "Input should be a valid boolean, unable to interpret input", value)
        return known
    errors.add("bool_type", place, "Input should be a valid boolean", value)
    return None


_BOOLEANS: Mapping[object, bool] = {
    **dict.fromkeys((1, "1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys((0, "0", "off", "f", "false", "n", "no"), False),
}


def integer(least: int | None = None, most: int | None = None) -> Reader:
    """An integer, also given as a string or as a float without a fraction."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        number = _whole(value, place, errors)
        if number is None:
            return None
        if least is not None and number < least:
            message = f"Input should be greater than or equal to {least}"
            errors.add("greater_than_equal", place, message, value, ge=least)
        elif most is not None and number > most:
            errors.add("less_than_equal", place, f"Input should be less than or equal to {most}", value, le=most)
        return number

    return read


def _whole(value: Any, place: Place, errors: Errors) -> int | None:
    if isinstance(value, float):
        if value == value and abs(value) != float("inf") and value == int(value):
            return int(value)
        text = "Input should be a valid integer, got a number with a fractional part"
        errors.add("int_from_float", place, text, value)
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([+-]?\d(?:_?\d)*)(?:\.0*)?\s*", value)
        if found is None or len(value) > 4300:
            text = "Input should be a valid integer, unable to parse string as an integer"
            errors.add("int_parsing", place, text, value)
            return None
        return int(found[1])
    if not isinstance(value, int):
        errors.add("int_type", place, "Input should be a valid integer", value)
        return None
    return int(value)


def number(value: Any, place: Place, errors: Errors) -> Any:
    """A number, also given as a string."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            text = "Input should be a valid number, unable to parse string as a number"
            errors.add("float_parsing", place, text, value)
            return None
    errors.add("float_type", place, "Input should be a valid number", value)
    return None


def literal(*options: str) -> Reader:
    """One of a few strings."""
    quoted = [f"'{option}'" for option in options]
    expected = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def read(value: Any, place: Place, errors: Errors) -> Any:
        if not isinstance(value, str) or value not in options:
            errors.add("literal_error", place, f"Input should be {expected}", value, expected=expected)
        return value

    return read


def optional(reader: Reader) -> Reader:
    """A value that ``reader`` accepts, or null."""
    return lambda value, place, errors: None if value is None else reader(value, place, errors)


def listing(reader: Reader, most: int | None = None) -> Reader:
    """A list of at most ``most`` values that ``reader`` accepts."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        if not isinstance(value, list):
            errors.add("list_type", place, "Input should be a valid list", value)
            return None
        if most is not None and len(value) > most:
            text = f"List should have at most {most} items after validation, not {len(value)}"
            errors.add("too_long", place, text, value, field_type="List", max_length=most, actual_length=len(value))
            return None
        return [reader(item, (*place, index), errors) for index, item in enumerate(value)]

    return read


def mapping(reader: Reader = anything) -> Reader:
    """An object whose values ``reader`` accepts."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        if not isinstance(value, dict):
            errors.add("dict_type", place, "Input should be a valid dictionary", value)
            return None
        return {key: reader(item, (*place, key), errors) for key, item in value.items()}

    return read


def either(*readers: Reader) -> Reader:
    """The first of several readers that accepts the value; if none does, all their errors."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        gathered: list[dict[str, Any]] = []
        for reader in readers:
            tried = Errors()
            result = reader(value, place, tried)
            if not tried.found:
                return result
            gathered += tried.found
        errors.found += gathered
        return None

    return read


class Field(msgspec.Struct, frozen=True):
    """A field of an object. A missing one gets ``default``, unless it is ``required``."""

    reader: Reader
    default: Any = None
    required: bool = False


def record(fields: Mapping[str, Field]) -> Reader:
    """An object with these fields; others are kept unchanged."""

    def read(value: Any, place: Place, errors: Errors) -> Any:
        if not isinstance(value, dict):
            text = "Input should be a valid dictionary or object to extract fields from"
            errors.add("model_attributes_type", place, text, value)
            return {}
        result = dict(value)
        for name, entry in fields.items():
            if name in value:
                result[name] = entry.reader(value[name], (*place, name), errors)
            elif entry.required:
                errors.add("missing", (*place, name), "Field required", value)
            else:
                result[name] = entry.default
        return result

    return read


def read_body(body: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Parse a request's body into its fields. Raises `ApiError` with all errors."""
    errors = Errors()
    result: dict[str, Any] = record(fields)(body, ("body",), errors)
    errors.refuse()
    return result


def body_missing() -> ApiError:
    """The rejection of a request without a body."""
    errors = Errors()
    errors.add("missing", ("body",), "Field required", None)
    return errors.rejection()


def body_not_json(position: int, message: str) -> ApiError:
    """The rejection of a body that is not JSON."""
    errors = Errors()
    errors.add("json_invalid", ("body", position), "JSON decode error", {}, error=message)
    return errors.rejection()
