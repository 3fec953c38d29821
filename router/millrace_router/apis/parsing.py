"""From bytes to objects of our types, and errors that name the field as the client wrote it.

Null means absent. Fields that clients send by habit and that cannot change the text are ignored (`IGNORED`); any
other unknown field is refused, because ignoring it would silently give another answer than the client asked for.
`cache_control`, which any object may have, is a hint for all of the prompt: it goes to the validation's context.

A field that may be of several types is a tagged union (`OneOf`, `OfType`): the value's own kind or type says which
one the client meant, so a mistake is reported about that one.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, TypeVar, get_args

from millrace_common.json_values import Json, JsonObject
from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError, Path
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True), Tag("an array")]  # the first mistake: a body may hold a million
String = Annotated[str, Tag("a string")]
Boolean = Annotated[bool, Tag("a boolean")]
Object = Annotated[JsonObject, Tag("an object")]
KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", type(None): "null"}
RESTS = {  # of sentences about a mistake, by pydantic's name for it
    "bool_type": "must be a boolean",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be an array",
    "literal_error": "must be {expected}",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_type": "must be a string",
    "union_tag_invalid": "must be one of: {expected_tags}",
    "union_tag_not_found": "is required",
}
SURROGATE = re.compile("[\ud800-\udfff]")
CACHE_CONTROL, TTL_S = "cache_control", {"5m": 300, "1h": 3600}
CACHE_HINT = "Keeps the prompt's cached pages for its `ttl`: `5m`, which is the default, or `1h`."
HABITS = frozenset(  # of objects of any kind: about caches, which are always on, or for the client itself
    {CACHE_CONTROL, "prompt_cache_breakpoint", "provider_metadata", "provider_options", "provider_specific_fields"}
)
IGNORED, REFUSED = "Ignored.", "Not supported:"  # how descriptions of such fields begin


def kind(value: Json) -> str:
    """Return the tag of a JSON value, or of an object that is parsed already."""
    return KINDS.get(type(value), "an object")


def mistake(rest: str, *path: str | int) -> PydanticCustomError:
    """About the part at `path` of the value that a validator was given. `rest`: of a sentence that begins with it."""
    return PydanticCustomError("mistake", "{rest}", {"rest": rest, "path": path})


def chosen(value: Json, handler: ValidatorFunctionWrapHandler) -> Json:
    """Read a tagged union. Mistakes do not name the tag, which is no part of the client's path."""
    try:
        return handler(value)
    except ValidationError as error:
        problem, (path, rest) = error.errors(include_url=False)[0], first_mistake(error)
        if problem["type"].startswith("union_tag"):
            if problem["ctx"]["discriminator"] == "'type'":
                raise mistake(_rest({**problem, "input": value.get("type")}), "type") from None
            kinds = problem["ctx"]["expected_tags"].replace("', '", " or ").strip("'")
            raise mistake(f"must be {kinds}, not {_shown(value)}") from None
        raise mistake(rest, *path[1:]) from None


def or_text(item: Callable[[str], Json], json_type: Json) -> BeforeValidator:
    """Take a text in place of an array with one item. `json_type`: of the array."""

    def items(value: Json) -> Json:
        if isinstance(value, str):
            return [item(value)]
        if not isinstance(value, list):
            raise mistake(f"must be a string or an array, not {_shown(value)}")
        return value

    return BeforeValidator(items, json_schema_input_type=str | json_type)


OneOf = Annotated[T, Discriminator(kind), WrapValidator(chosen)]  # T: a union of types with tags
OfType = Annotated[T, Discriminator("type"), WrapValidator(chosen)]  # T: a union of objects


def first_mistake(error: ValidationError) -> tuple[Path, str]:
    """Where it is, and what a FieldError says of it."""
    problems = error.errors(include_url=False)
    # of an object with another type than ours, the type says more than the fields that are missing for it
    typed = (problem for problem in problems if problem["type"] == "literal_error" or problem["loc"][-1:] == ("type",))
    problem = next(typed, problems[0])
    return problem["loc"] + tuple(problem.get("ctx", {}).get("path", ())), _rest(problem)


def _rest(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    if problem["type"] not in RESTS:
        return str(context.get("error") or problem["msg"])  # the former of a ValueError of ours
    rest = RESTS[problem["type"]].format_map(context)
    return rest if rest == RESTS["missing"] else f"{rest}, not {_shown(problem['input'])}"


def _shown(value: Json) -> str:
    return cut(json.dumps(value)) if isinstance(value, str | int | float) else kind(value)


class Known(BaseModel):
    """Reads an object. Clients send objects of their own types back with null in every field that the answer did not
    have, so null is absent.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}  # by name, with the reason or what to do instead

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Json, info: ValidationInfo) -> Json:
        if not isinstance(values, dict):
            return values
        note_hint(values, info.context)
        given = {name: value for name, value in values.items() if value is not None and name not in cls.IGNORED}
        for name, why in cls.UNSUPPORTED.items():
            if given.pop(name, "") not in ("", False, []):  # an empty object may ask for all defaults
                raise mistake(f"is not supported: {why}", name)
        if cls.model_config.get("extra") == "forbid" and (unknown := given.keys() - _names(cls)):
            kind, ours = given.get("type"), _types(cls)
            if ours and kind is not None and kind not in ours:  # which says more than the fields of the other type
                return {name: value for name, value in given.items() if name not in unknown}
            raise mistake("is unknown or not supported", next(name for name in given if name in unknown))
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        """As `_given` reads it: null is absent, and some fields are ignored or refused with a reason."""
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema.setdefault("properties", {})
        for name, value in properties.items():
            if name not in schema.get("required", ()) and {"type": "null"} not in value.get("anyOf", ()):
                outer = {key: value.pop(key) for key in ("default", "description", "title") if key in value}
                properties[name] = {"anyOf": [value, {"type": "null"}], **outer}
        for name in sorted(cls.IGNORED):
            properties.setdefault(name, {"description": CACHE_HINT if name == CACHE_CONTROL else IGNORED})
        for name, why in cls.UNSUPPORTED.items():
            properties.setdefault(name, {"description": f"{REFUSED} {why}.", "enum": [None, False]})
        return schema


def note_hint(values: JsonObject, hints: list[int] | None) -> None:
    """Add the seconds that an object's `cache_control` asks for to the hints of the request."""
    if (hint := values.get(CACHE_CONTROL)) is None:
        return
    if not isinstance(hint, dict):
        raise mistake(f"must be an object, not {_shown(hint)}", CACHE_CONTROL)
    ttl = hint.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise mistake(f"must be an object with the ttl {' or '.join(TTL_S)}, not {_shown(ttl)}", CACHE_CONTROL)
    if hints is not None:
        hints.append(TTL_S[ttl])


@functools.cache
def _names(model: type[Known]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@functools.cache
def _types(model: type[Known]) -> tuple[str, ...]:
    """The values of a field `type` that has only some."""
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None else ()


def at_most(most: int) -> BeforeValidator:
    """Refuse too many entries before each of them is checked."""

    def check(entries: Json) -> Json:
        if isinstance(entries, dict | list) and len(entries) > most:
            raise mistake(f"must have at most {most} entries, not {len(entries)}")
        return entries

    return BeforeValidator(check)


def json_object(body: bytes) -> JsonObject:
    """Return the object in a body. Raises INVALID_ARGUMENT."""
    try:
        values: Json = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body or b"\\uD" in body:  # JSON can spell lone surrogates, which no UTF-8 text contains
            _check_surrogates(values, ())
    except UnicodeDecodeError as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise MillraceError(Reason.INVALID_ARGUMENT, "the body must be a JSON object")
    return values


def _check_surrogates(value: Json, path: Path) -> None:
    if isinstance(value, str) and SURROGATE.search(value):
        raise FieldError(path, "is not valid UTF-8: it has a lone surrogate")
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(name, str) and SURROGATE.search(name):
                raise FieldError((*path, name), "has a name that is not valid UTF-8: a lone surrogate")
            _check_surrogates(inner, (*path, name))
