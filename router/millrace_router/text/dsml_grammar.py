"""The parameters of a call in DeepSeek V3.2's markup as rules of a grammar.

A string stands between its tags as it is, everything else is JSON. So a schema is taken apart where it can be both; a
string whose schema is not of the simple kind is written as JSON, which the parser reads as well.
"""

from collections.abc import Callable, Iterator

from millrace_common.grammar import pattern
from millrace_common.grammar.schema import Refused, below
from millrace_common.grammar.source import inline, terminal
from millrace_common.json_values import Json, JsonObject

from millrace_router.text import dsml
from millrace_router.text.markers import DSML

OF_STRINGS = {"pattern", "minLength", "maxLength"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs"}
NOT_IN_NAMES = frozenset('"<>\\')
MAX_REFS = 8
_NAME = r"[^\x{0}-\x{1F}\x{22}\x{3C}\x{3E}\x{5C}\x{7F}]{1,64}"


class Parameters:
    def __init__(self, call: str, schema: JsonObject, text: Callable[[str], str]) -> None:
        """`call`: the rule's name; `schema`: normal, of objects; `text`: a text as parts of a rule. Raises Refused."""
        self._call = call
        self._text = text
        self._defs = schema.get("$defs", {})
        self.rules: list[str] = []
        self._values = 0
        root = self._plain(schema)
        self._root(root if isinstance(root, dict) else {"type": "object"})

    def _root(self, schema: JsonObject) -> None:
        for key in schema:
            if key not in OF_OBJECTS:
                raise Refused(below("#", key), "is not supported for all parameters of a call in this model's format")
        named, needed = schema.get("properties", {}), schema.get("required", [])
        other = schema.get("additionalProperties", True)
        parts = []
        for name in [*named, *(name for name in needed if name not in named)]:
            if NOT_IN_NAMES & set(name) or DSML in name or not name.isprintable() or not name:
                raise Refused(below("#", "properties", name), "has a name that this model's format cannot hold")
            value = named.get(name, other)
            if value is False and name in needed:
                raise Refused(below("#", "required"), f"needs {name}, which nothing can be")
            if value is not False:
                parts.append(self._parameter(pattern.literal(name), value) + ("" if name in needed else "?"))
        if other is not False:
            taken = " | ".join(f"/{pattern.literal(name)}/" for name in named)
            self._terminal("NAME", f"/{_NAME}/{f' & ~({taken})' if taken else ''}")
            parts.append(self._parameter("", other, f"{self._call.upper()}NAME") + "*")
        self.rules.append(f"{self._call}args: {' '.join(parts) or chr(34) * 2}")

    def _parameter(self, name: str, schema: Json, terminal: str = "") -> str:
        """The name of its rule. `name`: an expression, or `terminal`, a name of one."""
        rule = f"{self._call}p{self._values}"
        begin, end = self._text(f'{dsml.PARAMETER} name="'), self._text(f"{dsml.PARAMETER_END}\n")
        options = []
        for raw, value in self._options(schema):
            self._values += 1
            said = "true" if raw else "false"
            attribute = f"{begin} {terminal or f'/{name}/'} {self._text(f'{chr(34)} string={chr(34)}{said}{chr(34)}>')}"
            if raw:
                closing, rest = self._closing()
                self._terminal(f"RAW{self._values}", f"{value} {closing}")
                options.append(f"{attribute} {self._call.upper()}RAW{self._values} {rest}")
            else:
                options.append(f"{attribute} {rule}v{self._values} {end}")
                definitions = {"$defs": self._defs} if self._defs else {}
                self.rules.append(f"{rule}v{self._values}: {inline({**value, **definitions})}")
        if not options:
            raise Refused(below("#", "properties"), "has a parameter that nothing can be")
        self.rules.append(f"{rule}: {' | '.join(options)}")
        return rule

    def _closing(self) -> tuple[str, str]:
        """What ends a string: it belongs to the same lexeme up to the first special token."""
        parts = self._text(f"{dsml.PARAMETER_END}\n").split(" ", 1)
        return (parts[0], parts[1]) if len(parts) > 1 else (parts[0], "")

    def _terminal(self, name: str, body: str) -> None:
        self.rules.append(f"{self._call.upper()}{name}: {body}")

    def _options(self, schema: Json) -> Iterator[tuple[bool, Json]]:
        """The forms of a value: (True, a terminal) for strings as they are, (False, a schema) for JSON."""
        left, seen = [schema], set[int]()
        while left:
            option = self._plain(left.pop(0))
            if not isinstance(option, dict):
                yield from self._forms({}) if option else ()
            elif set(option) != {"anyOf"}:
                yield from self._forms(option)
            elif id(option) not in seen:  # references may lead to it again, which allows no more
                seen.add(id(option))
                left[:0] = option["anyOf"]

    def _forms(self, schema: Json) -> Iterator[tuple[bool, Json]]:
        """The same of a schema that is no union."""
        keys = set(schema) - {"type"}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        types = schema.get("type", ["array", "boolean", "null", "number", "object", "string"])
        types = [types] if isinstance(types, str) else types
        if "string" not in types:
            yield False, schema
        elif keys in ({"enum"}, {"const"}):
            strings = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            if strings:
                yield True, f"({' | '.join(terminal(pattern.literal(value)) for value in strings)})"
            if others:
                yield False, {**{key: schema[key] for key in ("type",) if key in schema}, "enum": others}
        elif types == ["string"] and keys <= OF_STRINGS:
            yield True, self._raw(schema)
        elif keys & {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"}:
            yield False, schema
        else:
            yield True, self._raw(schema)
            rest = {key: value for key, value in schema.items() if key not in OF_STRINGS}
            if others := [name for name in types if name != "string"]:
                yield False, {**rest, "type": others}

    def _raw(self, schema: JsonObject) -> str:
        """A terminal of the strings that satisfy the schema."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [f"/{schema['pattern'][1:-1]}/"] if "pattern" in schema else []  # all of the string, and not in it
        if least or most != "":
            parts.append(f"/(?s:.{{{least},{most}}})/")
        if not self._closing()[1]:
            parts.append(f"/{pattern.without([dsml.PARAMETER_END])}/")
        return f"({' & '.join(parts or [f'/{pattern.ANY}/'])})"

    def _plain(self, schema: Json) -> Json:
        """What a schema that only refers to another one means."""
        for _ in range(MAX_REFS):
            if isinstance(schema, dict) and set(schema) - {"$defs"} == {"$ref"}:
                schema = self._defs[schema["$ref"].removeprefix("#/$defs/")]
        return schema
