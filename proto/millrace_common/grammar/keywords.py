"""Keywords of JSON Schema whose values are no schemas: checked, and said in words that llguidance keeps exactly.

llguidance reckons with doubles. A number here has at most 15 digits, so that its decimal form is what the client wrote,
and whoever parses the output gets a number on the same side of every bound.
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal

from millrace_common.grammar import formats, pattern
from millrace_common.json_values import Json, JsonObject
from millrace_common.quoted import cut

TYPES = ("null", "boolean", "number", "string", "array", "object")
NEWEST = 2020
# Keywords that allow or forbid values, and the draft that they came with. All others are annotations.
MEANING = {
    **dict.fromkeys(("$ref", "type", "enum", "allOf", "anyOf", "oneOf", "not", "multipleOf", "minimum", "maximum"), 4),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format"), 4),
    **dict.fromkeys(("items", "additionalItems", "minItems", "maxItems", "uniqueItems", "dependencies"), 4),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), 4),
    **dict.fromkeys(("minProperties", "maxProperties"), 4),
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("$recursiveRef", "dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 2019),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), 2020),
}
NOT_SUPPORTED = frozenset(
    ["not", "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"]
) | {"$recursiveRef", "$dynamicRef"}
MOST_DIGITS, LARGEST = 15, 2**53 - 1
LARGEST_BOUND = 2**63 - 1024  # of whole numbers: the largest that 64 bits and a double hold
MAX_MULTIPLES = 32  # different values of multipleOf in a schema
MAX_MULTIPLE = 10_000  # digits of multipleOf as a whole number: an automaton has as many states
# Patterns with look-ahead that libraries write, and the same without it.
_WITHOUT_LOOK_AHEAD = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",  # Decimal of pydantic
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (  # of zod
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}


class Unusable(ValueError):
    """A keyword's value cannot be used; `path`: where it is, below its schema."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.path = path


class LlguidancePattern(str):
    """A pattern in llguidance's form."""

    __slots__ = ()


def says_nothing(key: str, value: Json, given: Mapping[str, Json]) -> bool:
    """Whether a keyword that is not supported allows everything."""
    match key:
        case "not":
            return value is False
        case "if":
            return "then" not in given and "else" not in given
        case "then" | "else":
            return "if" not in given or allows_all(value)
        case "contains" | "minContains" | "maxContains":
            return "contains" not in given or (given.get("minContains") == 0 and "maxContains" not in given)
        case "unevaluatedProperties":  # schema.py says false as additionalProperties where that is the same
            return allows_all(value) or value is False or "additionalProperties" in given
        case "unevaluatedItems":
            return allows_all(value) or ("items" in given and not isinstance(given["items"], list))
    return False


def allows_all(schema: Json) -> bool:
    """Whether every value satisfies the schema because it says nothing."""
    return schema is True or (isinstance(schema, dict) and not MEANING.keys() & schema)


def types(given: Mapping[str, Json], at: str, refused: Callable[[str, str], Exception]) -> set[str]:
    """The types that `type` allows, with "integer" for whole numbers."""
    if "type" not in given:
        return {*TYPES, "integer"}
    names = given["type"] if isinstance(given["type"], list) else [given["type"]]
    if not names or not all(isinstance(name, str) and name in (*TYPES, "integer") for name in names):
        raise refused(f"{at}/type", f"must be one or more of {', '.join((*TYPES, 'integer'))}")
    return set(names)


def sizes(given: Mapping[str, Json], made: JsonObject, *names: str) -> None:
    for name in names:
        if name in given:
            made[name] = _count(given[name], name)


def _count(value: Json, name: str) -> int:
    """A larger maximum is the largest count."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Unusable((name,), "must be a whole number, 0 or more")
    if value > pattern.MAX_COUNT and not name.startswith("max"):
        raise Unusable((name,), f"must be at most {pattern.MAX_COUNT}")
    return min(value, pattern.MAX_COUNT)


def strings(given: Mapping[str, Json], made: JsonObject) -> None:
    sizes(given, made, "minLength", "maxLength")
    patterns = []
    if "pattern" in given:
        patterns.append(searched(given["pattern"], "pattern"))
    name = given.get("format")
    if isinstance(name, str):
        if name in formats.REFUSED:
            raise Unusable(("format",), f"{cut(name)} is not supported; {', '.join(formats.PATTERNS)} are")
        if name in formats.PATTERNS:
            patterns.append(searched(formats.PATTERNS[name], "format"))
        if name in formats.LENGTHS:
            made["maxLength"] = min(formats.LENGTHS[name], made.get("maxLength", pattern.MAX_COUNT))
    if patterns:
        made["pattern"] = patterns[0]
    if len(patterns) > 1:
        made["allOf"] = [{"pattern": patterns[1]}]


def searched(text: Json, *path: str) -> str:
    """A pattern of the client in llguidance's form."""
    if isinstance(text, LlguidancePattern):
        return str(text)
    if not isinstance(text, str):
        raise Unusable(path, "must be a regular expression")
    try:
        return f"^(?:{pattern.searched(_WITHOUT_LOOK_AHEAD.get(text, text))})$"
    except pattern.PatternError as error:
        raise Unusable(path, str(error)) from error


class Multiples:
    """All values of multipleOf in a schema: llguidance reckons with 32 bits when it puts several together."""

    def __init__(self) -> None:
        self._seen: set[Decimal] = set()

    def add(self, value: Decimal) -> bool:
        """False: too many digits, or too many values."""
        self._seen.add(value)
        if len(self._seen) > MAX_MULTIPLES:
            return False
        scale = max(max(-int(one.as_tuple().exponent), 0) for one in self._seen)
        wholes = [int(one.scaleb(scale)) for one in self._seen]
        return int(value.scaleb(_places(value))) <= MAX_MULTIPLE and math.lcm(*wholes) < 2**31


def numbers(given: Mapping[str, Json], made: JsonObject, *, exact: bool, multiples: Multiples) -> None:
    """`exact`: of whole numbers alone."""
    for name, other, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bounds = []
        excluded = given.get(other)
        if name in given and excluded is not True:
            bounds.append(_bound(given[name], name, exact))
        if excluded is True and name in given:  # as in draft 4
            bounds.append(_beyond(_bound(given[name], name, exact), sign, exact))
        elif excluded is not None and not isinstance(excluded, bool):
            bounds.append(_beyond(_bound(excluded, other, exact), sign, exact))
        if bounds:
            made[name] = _json(_held(max(bounds) if sign > 0 else min(bounds), sign, name))
    if "multipleOf" in given:
        value = number(given["multipleOf"], "multipleOf")
        if value <= 0:
            raise Unusable(("multipleOf",), "must be more than 0")
        if not multiples.add(value):
            raise Unusable(("multipleOf",), "has too many digits, alone or combined with the schema's other multipleOf")
        made["multipleOf"] = _json(value)


def _bound(value: Json, name: str, exact: bool) -> Decimal:
    """Bounds of whole numbers may be of any size."""
    if exact and isinstance(value, int | float) and not isinstance(value, bool) and LARGEST < abs(value) < math.inf:
        return Decimal(value)
    return number(value, name)


def _held(bound: Decimal, sign: int, name: str) -> Decimal:
    """The bound, or the next whole number inside it that a double and 64 bits hold."""
    if abs(bound) <= LARGEST:
        return bound
    if sign * bound > LARGEST_BOUND:
        raise Unusable((name,), "leaves only whole numbers of more than 64 bits")
    bound = sign * max(sign * bound, Decimal(-LARGEST_BOUND))
    near = float(bound)
    return Decimal(near if sign * (Decimal(near) - bound) >= 0 else math.nextafter(near, sign * math.inf))


def number(value: Json, *path: str) -> Decimal:
    finite = math.isfinite(value) if isinstance(value, float) else type(value) is int  # of any size
    if not finite:
        raise Unusable(path, "must be a number")
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    exact = exact.normalize() if exact else Decimal(0)
    if (
        abs(exact) > LARGEST
        or _places(exact) > MOST_DIGITS
        or (_places(exact) and len(exact.as_tuple().digits) > MOST_DIGITS)
    ):
        raise Unusable(path, f"must be less than 2**53, and a fraction have at most {MOST_DIGITS} digits")
    return exact


def _places(value: Decimal) -> int:
    return max(-int(value.normalize().as_tuple().exponent), 0)


def _beyond(bound: Decimal, sign: int, exact: bool) -> Decimal:
    """The next number: of whole ones, or of those with 15 digits, which no double rounds to the bound itself."""
    if exact:
        return Decimal(math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1)
    whole = len(str(int(abs(bound)))) if abs(bound) >= 1 else 0
    return bound + sign * Decimal(1).scaleb(whole - MOST_DIGITS)


def _json(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def values(given: Mapping[str, Json], made: JsonObject) -> None:
    if "const" in given:
        made["const"] = _value(given["const"], "const")
    if "enum" in given:
        options = given["enum"]
        if not isinstance(options, list) or not options:
            raise Unusable(("enum",), "must be a list of at least one value")
        made["enum"] = [_value(option, "enum", str(i)) for i, option in enumerate(options)]


def _value(value: Json, *path: str) -> Json:
    match value:
        case int() | float() if not isinstance(value, bool):
            return _json(number(value, *path))
        case list():
            return [_value(item, *path, str(i)) for i, item in enumerate(value)]
        case dict():
            return {name: _value(item, *path, name) for name, item in value.items()}
        case str() if pattern.UNWRITABLE & set(value):
            raise Unusable(path, "has a control character, which is not supported")
    return value


def count_of_properties(made: Mapping[str, Json]) -> None:
    """llguidance counts what it writes. Names that a schema does not list may repeat, and count once for readers."""
    needed = set(made.get("required", ()))
    least = made.get("minProperties", 0) - len(needed)
    most = made.get("maxProperties")
    free = made.get("additionalProperties", True) is not False or bool(made.get("patternProperties"))
    optional = {name for name, schema in made.get("properties", {}).items() if schema is not False} - needed
    if optional and (least > 0 or most is not None):
        if free or least > 1 or (most is not None and most - len(needed) != 1):
            path = "minProperties" if least > 0 else "maxProperties"
            raise Unusable((path,), "is supported only if all named properties are required, or exactly one of them")
    elif free and least > 1:
        raise Unusable(("minProperties",), "may ask for at most one property that the schema does not name")
