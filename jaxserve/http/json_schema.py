"""JSON Schema (2020-12) of request bodies and replies, from the declarations that check the ones and write the others.

What it cannot say is left to the answer: a prompt's length in tokens, min_tokens against max_tokens, a chat template's
own mind, the keys of logit_bias against the vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from jaxserve.http.schema import (
    Body,
    Conflict,
    Facts,
    FieldSpec,
    conflicts,
    field_specs,
    within,
)
from jaxserve.request import STRUCTURED_KINDS

Schema = dict[str, Any]

REFS = "#/components/schemas/{name}"
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_SIGNS = {
    "ge": "≥",
    "gt": ">",
    "le": "≤",
    "lt": "<",
    "const": "=",
    "min_length": "of length ≥",
    "max_items": "of size ≤",
}
_OPPOSITES = {"ge": "exclusiveMaximum", "gt": "maximum", "le": "exclusiveMinimum", "lt": "minimum"}
_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum",
             "min_length": "minLength", "max_length": "maxLength"}  # fmt: skip


def body_schema(cls: type[Body], facts: Facts) -> Schema:
    """The JSON objects that parse() takes for this class."""
    specs = field_specs(cls)
    needed_first = sorted(specs.items(), key=lambda item: not item[1].required)
    properties = {name: _field_schema(name, spec, facts) for name, spec in needed_first}
    properties |= {name: {"enum": [None, *values]} for name, values in cls.unsupported.items() if name not in specs}
    schema: Schema = {
        "type": "object",
        "description": (cls.__doc__ or "").strip(),
        "properties": properties,
        "required": [name for name, spec in specs.items() if spec.required],
        "additionalProperties": facts.ignore_unknown,
    }
    if rules := [_conflict_schema(conflict, specs, facts) for conflict in conflicts(cls)]:
        schema["allOf"] = rules
    return schema


def _field_schema(name: str, spec: FieldSpec, facts: Facts) -> Schema:
    limits = dict(spec.metadata)
    if limits.get("token_ids"):
        limits["items"] = {**limits.get("items", {}), "le": facts.vocab_size - 1}
    if limits.get("context"):
        limits["le"] = facts.max_model_len - 1
    own: Any = limits.get("schema", {})
    if callable(own):
        own = own(facts)
    if "like" in limits:
        own = {"anyOf": [{"type": "null"}, _like(limits["like"])]}
    schema = {"description": limits.get("doc", ""), **(own or type_schema(spec.type, limits, null=not spec.required))}
    default = facts.defaults.get(name, spec.default)
    if not spec.required and default is not dataclasses.MISSING:
        schema["default"] = default
    if "example" in limits:
        schema["examples"] = [limits["example"]]
    return schema


def type_schema(annotation: Any, limits: Mapping[str, Any], *, null: bool = False) -> Schema:
    """The values of an annotated type within the limits of knob(); with `null` also null."""
    members = () if _origin(annotation) in (list, dict) else getattr(annotation, "__args__", ())
    kinds = [each for each in members or (annotation,) if each is not type(None)]
    lists = any(_origin(kind) is list for kind in kinds)
    schemas = [_one(kind, limits.get("items", {}) if lists and kind is str else limits) for kind in kinds]
    null = null or len(kinds) < len(members)
    if len(schemas) > 1:
        return _any([*schemas, *([{"type": "null"}] if null else [])])
    (schema,) = schemas
    if not schema:
        return schema
    return {**schema, "type": [schema["type"], "null"]} if null else schema


def _like(cls: type) -> Schema:
    """An object with the fields of a dataclass. Exactly one of its kinds is given."""
    properties = {
        f.name: {"description": f.metadata["doc"]}
        | (f.metadata.get("schema") or type_schema(f.type, f.metadata, null=True))
        for f in dataclasses.fields(cls)
    }
    given = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in STRUCTURED_KINDS]
    return {"type": "object", "properties": properties, "additionalProperties": False, "oneOf": given}


def _origin(kind: Any) -> Any:
    return getattr(kind, "__origin__", kind)


def _one(kind: Any, limits: Mapping[str, Any]) -> Schema:
    if kind is Any:
        return {}
    origin, args = _origin(kind), getattr(kind, "__args__", ())
    size = {_size(key, origin): limits[key] for key in ("min_items", "max_items") if key in limits}
    if origin is list:
        return {"type": "array", **({"items": type_schema(args[0], limits.get("items", {}))} if args else {}), **size}
    if origin is dict:
        schema: Schema = {"type": "object", **size}
        if args and args[0] is int:
            schema["propertyNames"] = {"pattern": "^[0-9]{1,11}$"}
        if args and args[1] is not Any:
            schema["additionalProperties"] = type_schema(args[1], {})
        return schema
    if kind not in _NAMES:
        raise TypeError(f"no JSON Schema for {kind}: give the field one (schema=...)")
    return {"type": _NAMES[kind], **{_KEYWORDS[key]: value for key, value in limits.items() if key in _KEYWORDS}}


def _size(key: str, origin: type) -> str:
    return key.removesuffix("_items") + ("Items" if origin is list else "Properties")


def _conflict_schema(conflict: Conflict, specs: Mapping[str, FieldSpec], facts: Facts) -> Schema:
    """One of the two is outside its limits. An absent field has its default, and so has null."""
    pairs = ((conflict.field, conflict.limits), (conflict.other, conflict.other_limits))
    return {
        "description": f"not both {_words(*pairs[0])} and {_words(*pairs[1])}",
        "anyOf": [_outside_schema(name, limits, specs[name], facts) for name, limits in pairs],
    }


def _words(name: str, limits: Mapping[str, Any]) -> str:
    if limits == {"const": None}:
        return f"no {name}"
    return " ".join([name, *(f"{_SIGNS[key]} {str(limit).lower()}" for key, limit in limits.items())])


def _outside_schema(name: str, limits: Mapping[str, Any], spec: FieldSpec, facts: Facts) -> Schema:
    values = [_outside(key, limit) for key, limit in limits.items()]
    if within(facts.defaults.get(name, spec.default), limits):
        return {"properties": {name: _any(values)}, "required": [name]}
    return {"properties": {name: _any([*values, {"type": "null"}])}}


def _any(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _outside(key: str, limit: Any) -> Schema:
    if key == "const" and limit is None:
        return {"not": {"type": "null"}}
    if key == "min_length":
        return {"type": "string", "maxLength": limit - 1}
    if key == "max_items":
        return {"type": "array", "minItems": limit + 1}
    if key == "const":
        return {"const": not limit} if isinstance(limit, bool) else {"type": "number", "not": {"const": limit}}
    return {"type": "number", _OPPOSITES[key]: limit}


def reply_schemas(types: Iterable[Any]) -> dict[Any, Schema]:
    """A schema per type, and under their names those that they refer to.

    A field that is always sent is required, whether or not the struct has a default for it.
    """
    kinds = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFS)
    for component in components.values():
        always = set(component.get("required", ()))
        for name, field in component.get("properties", {}).items():
            if "default" in field:  # one that may be left out is UNSET, which has no default in JSON
                default = field.pop("default")
                always.add(name)
                if name == "object":
                    field["const"] = default
        if "properties" in component:
            component["required"] = [name for name in component["properties"] if name in always]
    return dict(zip(kinds, schemas, strict=True)) | components
