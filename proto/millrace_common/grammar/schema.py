"""JSON schemas in a form that llguidance keeps word for word.

llguidance refuses most of what it cannot enforce; the rest is refused here, with a JSON pointer, or said in other words
that mean the same. What comes out has only keywords with one meaning in all drafts, no annotations and no extensions,
and every reference points to an entry of `$defs`. docs/reference/api-tools.md has the table of keywords.
"""

import re
import urllib.parse
from collections.abc import Mapping

from millrace_common.grammar import keywords
from millrace_common.grammar.text import MAX_PATTERNS
from millrace_common.json_values import Json, JsonObject
from millrace_common.quoted import cut

Schema = JsonObject | bool
_DIALECT = re.compile(r"https?://json-schema\.org/draft(?:-0(\d)|/(\d{4})-\d\d)/schema#?")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependentRequired", "dependencies")


class Refused(ValueError):
    """The schema has something that cannot be enforced. `pointer` is a JSON pointer in the form of a fragment."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"at {cut(pointer)}: {reason}")
        self.pointer = pointer


def normal(schema: Json, *, is_object: bool = False) -> tuple[JsonObject, dict[int, str]]:
    """The schema in the form above, and the pointers of its parts by their id(). Raises Refused.

    `is_object`: the values are objects, whether or not the schema says so.
    """
    return _Normal(schema).root(is_object)


def below(pointer: str, *names: str | int) -> str:
    steps = (str(name).replace("~", "~0").replace("/", "~1") for name in names)
    return "/".join((pointer, *(urllib.parse.quote(step, safe="~!$&'()*+,;=:@") for step in steps)))


class _Normal:
    def __init__(self, document: Json) -> None:
        self._document = document
        self._draft = _dialect(document, "#")
        self._keys: dict[str, str] = {}  # of _defs, by what references say
        self._defs: dict[str, Schema] = {}
        self._pending: list[tuple[str, Json, str]] = []
        self._one_ofs: list[JsonObject] = []
        self._places: dict[int, str] = {}
        self._multiples = keywords.Multiples()
        self._patterns = 0  # characters

    def root(self, is_object: bool) -> tuple[JsonObject, dict[int, str]]:
        made = self._schema(self._document, "#")
        while self._pending:
            key, target, at = self._pending.pop()
            self._defs[key] = self._schema(target, at)
        for one_of in self._one_ofs:
            one_of["oneOf"] = [self._without_references(option) for option in one_of["oneOf"]]
        if made is False:
            raise Refused("#", "false allows no value")
        result: JsonObject = {} if made is True else made
        if is_object and not self._says_object(result):
            if "object" not in result.get("type", "object"):
                raise Refused("#/type", "must be object")
            result = {**result, "type": "object"}
        if self._defs:
            result = {**result, "$defs": self._defs}
        return result, self._places

    def _without_references(self, schema: Schema, depth: int = 8) -> Schema:
        """The schema without references in its alternatives: llguidance proves that options of `oneOf` exclude each
        other, and follows none for it.
        """
        if not isinstance(schema, dict) or not depth:
            return schema
        if set(schema) == {"$ref"}:
            return self._without_references(self._defs[schema["$ref"].removeprefix("#/$defs/")], depth - 1)
        parts = {key: schema[key] for key in ("allOf", "anyOf", "oneOf") if key in schema}
        if not parts:
            return schema
        made = dict(schema)
        for key, several in parts.items():
            made[key] = [self._without_references(part, depth - 1) for part in several]
        self._places[id(made)] = self._places.get(id(schema), "#")
        return made

    def _says_object(self, schema: Schema, refs: int = 8) -> bool:
        if not isinstance(schema, dict):
            return False
        target = self._defs.get(schema.get("$ref", "").removeprefix("#/$defs/"))
        return schema.get("type") == "object" or (
            refs > 0 and target is not None and self._says_object(target, refs - 1)
        )

    def _schema(self, value: Json, at: str) -> Schema:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise Refused(at, "must be a schema: an object, true or false")
        self._same_document(value, at)
        given = {k: item for k, item in value.items() if k in keywords.MEANING and (item is not None or k == "const")}
        if "$ref" in given and self._draft <= 7:
            given = {"$ref": given["$ref"]}  # what stands beside it has no meaning in these drafts
        if keywords.allows_all(given.get("not", False)):
            return False
        self._check(given, at)
        self._count_patterns(given, at)
        made: JsonObject = {}
        types = keywords.types(given, at, Refused)
        if types != set(keywords.TYPES) | {"integer"}:
            made["type"] = sorted(types) if len(types) != 1 else next(iter(types))
        try:
            if "string" in types:
                keywords.strings(given, made)
            if types & {"number", "integer"}:
                keywords.numbers(given, made, exact="number" not in types, multiples=self._multiples)
            if "array" in types:
                self._arrays(given, made, at)
            if "object" in types:
                self._objects(given, made, at)
            keywords.values(given, made)
        except keywords.Unusable as error:
            raise Refused(below(at, *error.path), str(error)) from error
        self._combine(given, made, at)
        self._places[id(made)] = at
        return made

    def _count_patterns(self, given: Mapping[str, Json], at: str) -> None:
        names = given.get("patternProperties", {})
        patterns = [given.get("pattern"), *(names if isinstance(names, dict) else ())]
        self._patterns += sum(len(one) for one in patterns if isinstance(one, str))
        if self._patterns > MAX_PATTERNS:
            raise Refused(at, f"all patterns together have more than {MAX_PATTERNS} characters")

    def _check(self, given: Mapping[str, Json], at: str) -> None:
        for key, item in given.items():
            since = keywords.MEANING[key]
            if since > self._draft:
                raise Refused(below(at, key), "the draft that $schema names has no such keyword")
            if key in keywords.NOT_SUPPORTED and not keywords.says_nothing(key, item, given):
                raise Refused(below(at, key), "is not supported")

    def _same_document(self, value: Mapping[str, Json], at: str) -> None:
        """References are of one document in one dialect."""
        for key in ("contentEncoding", "contentMediaType"):
            if key in value and self._draft in (6, 7):
                raise Refused(below(at, key), "is not supported in drafts 6 and 7; later ones do not check it")
        if at == "#":
            return
        for key in ("$id", "id") if self._draft == 4 else ("$id",):
            if isinstance(name := value.get(key), str) and not name.startswith("#"):
                raise Refused(below(at, key), "a schema with its own identifier inside another one is not supported")
        if "$schema" in value and _dialect(value, at) != self._draft:
            raise Refused(below(at, "$schema"), "another draft inside a schema is not supported")

    def _arrays(self, given: Mapping[str, Json], made: JsonObject, at: str) -> None:
        keywords.sizes(given, made, "minItems", "maxItems")
        first, rest, rest_key = given.get("prefixItems"), given.get("items"), "items"
        first_key = "prefixItems"
        if isinstance(rest, list):
            if first is not None:
                raise Refused(below(at, "items"), "cannot be a list beside prefixItems")
            first, first_key, rest, rest_key = rest, "items", given.get("additionalItems"), "additionalItems"
        elif "additionalItems" in given and first is not None:
            raise Refused(below(at, "additionalItems"), "has no meaning beside prefixItems; use items")
        if first is not None:
            made["prefixItems"] = self._list(first, below(at, first_key))
        if rest is not None:
            made["items"] = self._schema(rest, below(at, rest_key))
        most = made.get("maxItems")
        if made.get("items") is False:
            most = min(most if most is not None else len(made.get("prefixItems", ())), len(made.get("prefixItems", ())))
        if given.get("uniqueItems") and (most is None or most > 1):
            raise Refused(below(at, "uniqueItems"), "is not supported for more than one item")

    def _objects(self, given: Mapping[str, Json], made: JsonObject, at: str) -> None:
        keywords.sizes(given, made, "minProperties", "maxProperties")
        needed = given.get("required", [])
        if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
            raise Refused(below(at, "required"), "must be a list of names")
        named = self._map(given, "properties", at)
        by_pattern = self._map(given, "patternProperties", at)
        other = self._schema(given.get("additionalProperties", True), below(at, "additionalProperties"))
        if given.get("unevaluatedProperties") is False and "additionalProperties" not in given:
            if any(key in given for key in _IN_PLACE):
                raise Refused(below(at, "unevaluatedProperties"), "is not supported beside other schemas")
            other = False
        if "propertyNames" in given:
            other = self._property_names(given, named, by_pattern, other, at)
        if named:
            made["properties"] = named
        if needed:
            made["required"] = list(dict.fromkeys(needed))
        if by_pattern:
            made["patternProperties"] = {
                keywords.searched(pattern, "patternProperties", pattern): schema
                for pattern, schema in by_pattern.items()
            }
        if other is not True:
            made["additionalProperties"] = other
        keywords.count_of_properties(made)

    def _property_names(
        self, given: Mapping[str, Json], named: dict[str, Schema], by_pattern: dict[str, Schema], other: Schema, at: str
    ) -> Schema:
        """Say propertyNames with the other keywords; the result is for all other properties."""
        where = below(at, "propertyNames")
        names = self._schema(given["propertyNames"], where)
        while isinstance(names, dict) and set(names) <= {"$ref", "type"} and "$ref" in names:
            names = self._schema(*self._target(names, where))
        if names is True:
            return other
        if not isinstance(names, dict) or "string" not in names.get("type", "string"):
            raise Refused(where, "is not supported here")
        if set(names) <= {"type"}:
            return other
        if by_pattern:
            raise Refused(where, "is not supported here")
        if {"enum", "const"} & set(names) and set(names) <= {"enum", "const", "type"}:
            allowed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
            for name in named:
                named[name] = named[name] if name in allowed else False
            for name in allowed:
                named.setdefault(name, other)
            return False
        if set(names) <= {"pattern", "type"} and not named:
            by_pattern[keywords.LlguidancePattern(names["pattern"])] = other
            return False
        if set(names) <= {"minLength", "maxLength", "type"} and not named:
            lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            by_pattern[keywords.LlguidancePattern(f"^(?:(?s:.{{{lengths}}}))$")] = other
            return False
        raise Refused(where, "may have enum or const; without properties also pattern, format or lengths")

    def _target(self, made: Mapping[str, Json], at: str) -> tuple[Json, str]:
        """What a reference in our form stands for, as the client wrote it."""
        pointer = next(pointer for pointer, key in self._keys.items() if made["$ref"] == f"#/$defs/{key}")
        return self._resolve(pointer, at), pointer

    def _combine(self, given: Mapping[str, Json], made: JsonObject, at: str) -> None:
        if "$ref" in given:
            made["$ref"] = self._reference(given["$ref"], below(at, "$ref"))
        if "allOf" in given:
            made["allOf"] = made.get("allOf", []) + self._list(given["allOf"], below(at, "allOf"))
        for key in ("anyOf", "oneOf"):
            if key in given:
                options = self._list(given[key], below(at, key))
                if key == "oneOf" and len(options) > 1:
                    made["oneOf"] = options
                    self._one_ofs.append(made)
                elif "anyOf" in made:
                    made.setdefault("allOf", []).append({"anyOf": options})
                else:
                    made["anyOf"] = options
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, then in self._dependencies(given, key, at).items():
                lacks: Schema = {"properties": {name: False}}
                made.setdefault("allOf", []).append({"anyOf": [lacks, then]})

    def _dependencies(self, given: Mapping[str, Json], key: str, at: str) -> dict[str, Schema]:
        """By the property that brings them: what objects satisfy that have it."""
        items = given.get(key, {})
        if not isinstance(items, dict):
            raise Refused(below(at, key), "must be an object")
        found: dict[str, Schema] = {}
        for name, then in items.items():
            if isinstance(then, list) and key != "dependentSchemas" and all(isinstance(one, str) for one in then):
                found[name] = {"required": list(dict.fromkeys([name, *then]))}
            elif key == "dependentRequired":
                raise Refused(below(at, key, name), "must be a list of names")
            else:
                found[name] = {"required": [name], "allOf": [self._schema(then, below(at, key, name))]}
        return found

    def _list(self, value: Json, at: str) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise Refused(at, "must be a list of at least one schema")
        return [self._schema(item, below(at, i)) for i, item in enumerate(value)]

    def _map(self, given: Mapping[str, Json], key: str, at: str) -> dict[str, Schema]:
        items = given.get(key, {})
        if not isinstance(items, dict):
            raise Refused(below(at, key), "must be an object of schemas")
        return {name: self._schema(item, below(at, key, name)) for name, item in items.items()}

    def _reference(self, pointer: Json, at: str) -> str:
        target = self._resolve(pointer, at)
        if pointer not in self._keys:
            self._keys[pointer] = str(len(self._keys))
            self._pending.append((self._keys[pointer], target, pointer))
        return f"#/$defs/{self._keys[pointer]}"

    def _resolve(self, pointer: Json, at: str) -> Json:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise Refused(at, "only references into the same schema, which begin with #/, are supported")
        target = self._document
        for step in urllib.parse.unquote(pointer).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise Refused(at, f"there is no {pointer}")
        return target


def _dialect(schema: Json, at: str) -> int:
    """The draft that `$schema` names: 4 to 7, 2019 or 2020; without it the newest."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if name is None:
        return keywords.NEWEST
    found = _DIALECT.fullmatch(name) if isinstance(name, str) else None
    draft = int(found[1] or found[2]) if found else 0
    if draft not in (4, 6, 7, 2019, 2020):
        raise Refused(below(at, "$schema"), "must be one of JSON Schema's drafts 4, 6, 7, 2019-09 and 2020-12")
    return draft
