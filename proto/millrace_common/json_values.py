"""Types of parsed JSON and YAML."""

from typing import Any

# Any, because a recursive union would need a cast at every index. Who reads a value checks what it takes: pydantic
# does for requests and settings, isinstance elsewhere.
Json = Any
JsonObject = dict[str, Json]
