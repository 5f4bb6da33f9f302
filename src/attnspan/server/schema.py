"""JSON from anywhere, parsed and checked against a JSON schema; the first thing that is wrong is named by its path.

`parse` takes what JSON defines and no more: no NaN or Infinity, no numbers beyond float64, no text that UTF-8 cannot
write. `check` knows the part of JSON Schema that the requests here use, and returns the value with whole floats as ints
where an integer is asked for (JSON has one kind of number).

>>> check({"n": 3.0}, {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}})
{'n': 3}
>>> check({"n": 0}, {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}})
Traceback (most recent call last):
attnspan.server.api_errors.ApiError: n must be at least 1, got 0
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from attnspan.server.api_errors import ApiError

Schema = Mapping[str, Any]

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int, float), "a whole number"),
    "number": ((int, float), "a number"),
    "array": ((list,), "an array"),
    "object": ((dict,), "an object"),
}

_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, bound: value >= bound, "at least"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "above"),
    "maximum": (lambda value, bound: value <= bound, "at most"),
}

_SIZES = {
    "minLength": "at least {} characters long", "maxLength": "at most {} characters long",
    "minItems": "an array of at least {} items", "maxItems": "an array of at most {} items",
    "maxProperties": "an object of at most {} members",
}  # fmt: skip


def parse(body: bytes) -> Any:
    """The value that a body is; an ApiError if it is none."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except UnicodeError:
        raise ApiError(400, "the body holds text that is not valid UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def check(value: Any, schema: Schema, path: str = "") -> Any:
    """The value, as the schema has it; an ApiError that names what is not as it should be."""
    if "anyOf" in schema:
        return _any_of(value, schema["anyOf"], path)
    kind = schema.get("type")
    if kind is None:
        return value
    types, noun = _KINDS[kind]
    whole = kind != "integer" or not isinstance(value, float) or value.is_integer()
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "boolean") or not whole:
        raise _wrong(path, noun, value)
    if kind == "integer":
        value = int(value)  # type: ignore[call-overload]  # a number
    if "enum" in schema and value not in schema["enum"]:
        raise _wrong(path, f"one of {', '.join(map(repr, schema['enum']))}", value)
    for bound, (holds, words) in _BOUNDS.items():
        if bound in schema and not holds(value, schema[bound]):
            raise _wrong(path, f"{words} {schema[bound]}", value)
    for size, words in _SIZES.items():
        if size in schema and not (len(value) >= schema[size] if size[:3] == "min" else len(value) <= schema[size]):
            raise _wrong(path, words.format(schema[size]), value)
    if kind == "array":
        return [check(each, schema.get("items", {}), f"{path}[{place}]") for place, each in enumerate(value)]
    return _members(value, schema, path) if kind == "object" else value


def _members(value: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    """An object without the members that are null: they stand for what is left out."""
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = {}
    for name, each in value.items():
        inner = f"{path}.{name}" if path else name
        if name not in known and others is False:
            if each is None:
                continue
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ApiError(
                400, f"{_short(inner)} is not a field known here{hint}", param=_short(inner), code="unknown_field"
            )
        if each is None and name in known:
            continue
        found[name] = check(each, known.get(name, others if isinstance(others, Mapping) else {}), inner)
    for name in schema.get("required", ()):
        if name not in found:
            inner = f"{path}.{name}" if path else name
            raise ApiError(400, f"{inner} is required", param=inner, code="missing_field")
    return found


def _any_of(value: Any, schemas: list[Schema], path: str) -> Any:
    """By the schema of the value's own type, so that the message is about what was meant."""
    faults = []
    for schema in schemas:
        try:
            return check(value, schema, path)
        except ApiError as fault:
            faults.append(fault)
    deepest = max(faults, key=lambda fault: len(fault.param or ""))
    if len(deepest.param or "") > len(path):
        raise deepest
    fitting = [fault for fault, schema in zip(faults, schemas, strict=True) if _is_kind(value, schema)]
    if fitting:
        raise fitting[0]
    raise _wrong(path, " or ".join(_KINDS[schema["type"]][1] for schema in schemas), value)


def _is_kind(value: Any, schema: Schema) -> bool:
    return isinstance(value, _KINDS[schema["type"]][0]) and (not isinstance(value, bool) or schema["type"] == "boolean")


def _wrong(path: str, rule: str, value: Any) -> ApiError:
    name = _short(path) or "the body"
    return ApiError(
        400, f"{name} must be {rule}, got {reprlib.repr(value)}", param=_short(path) or None, code="invalid_value"
    )


def _short(path: str) -> str:
    """A path may hold names of the client's own."""
    return path if len(path) <= 100 else path[:97] + "..."
