"""Tenants: the API keys of a file, and the rights of each.

The file is a mounted secret, YAML or JSON (docs/how-to/tenants.md has one), looked at again while we run. A request is
checked when it comes, against a file that was there a second ago, or later. A file that cannot be used may have lost
keys since it could: then every request is refused, or with `keep` the keys of before hold.

Only hashes are kept. A key is looked up by its hash, so the time of a look-up reveals nothing about existing keys.
Without a file every caller is the tenant "default", without limits.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Self

import yaml
from millrace_common.config import Config
from millrace_common.json_values import Json
from millrace_common.reasons import Reason
from millrace_common.reloaded import Reloaded
from millrace_rpc.errors import MillraceError
from pydantic import Field, ValidationError, model_validator

from millrace_router.config import SloConfig
from millrace_router.queue.tenant import Bucket, Running, Tenant

LEAST_KEY_CHARS = 32
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
BURST_S = 2.0  # seconds of a rate that its burst is, unless it is given


class ApiKey(Config):
    name: str = Field(pattern=NAME)  # a tenant may have several keys
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # hex; made from `key` where the file has that
    weight: float = Field(1.0, gt=0, le=1000)
    priority: int = Field(0, ge=-100, le=100)
    requests_per_s: float | None = Field(None, gt=0)
    requests_burst: float | None = Field(None, ge=1)
    tokens_per_s: float | None = Field(None, gt=0)
    tokens_burst: float | None = Field(None, ge=1)
    max_concurrent: int | None = Field(None, ge=1)  # requests that run at once, waiting ones and every choice included
    max_tokens_in_flight: int | None = Field(None, ge=1)  # prompts of these, and the most that the outputs may have
    slo: SloConfig = SloConfig()  # in the place of the router's routing.slo
    cache_group: str | None = Field(None, pattern=NAME)  # tenants of one group share cached pages; none: alone

    @model_validator(mode="before")
    @classmethod
    def _hash(cls, values: Json) -> Json:
        if not isinstance(values, dict) or "key" not in values:
            return values
        key = values["key"]
        if "sha256" in values or not isinstance(key, str) or len(key) < LEAST_KEY_CHARS:
            name = values.get("name")
            whose = f" of {name}" if isinstance(name, str) and re.fullmatch(NAME, name) else ""
            text = f"give either sha256 or key, a text of at least {LEAST_KEY_CHARS} characters"
            raise ValueError(f"key{whose}: {text} (`millrace keys new` makes one)")
        return {name: value for name, value in values.items() if name != "key"} | {"sha256": _sha256(key)}


class KeyFile(Config):
    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if not self.keys:  # beside a wrong key, `min_length` would also count those that are right
            raise ValueError("keys: must have at least one")
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("keys: two have the same sha256")
        if len({key.name for key in self.keys}) < len({key.model_copy(update={"sha256": ""}) for key in self.keys}):
            raise ValueError("keys: two of the same name differ in more than the key")
        return self


class Keys:
    """The tenants of a file. Raises OSError when the file is unusable at the start."""

    def __init__(
        self, path: Path, clock: Callable[[], float], on_reload: Callable[[str], None], *, keep: bool = False
    ) -> None:
        """`keep`: while the file cannot be used, the keys of before hold; else every request is refused."""
        self._clock = clock
        self._keep = keep
        self._tenants: dict[str, Tenant] = {}  # by name
        self._file = Reloaded("api_keys", "API keys", [path], lambda: self._load(path), on_reload, clock)

    def tenant(self, authorization: str) -> Tenant:
        """Return the tenant of the key in an Authorization header.

        Raises UNAUTHENTICATED for an unknown key, NOT_READY while the keys are not known.
        """
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise MillraceError(
                Reason.UNAUTHENTICATED, "give an API key: Authorization: Bearer <key>, or x-api-key: <key>"
            )
        tenant = self._file.get().get(_sha256(key.strip()))
        if self._file.error and not self._keep:
            raise MillraceError(Reason.NOT_READY, "the router cannot use its file of API keys: its log says why")
        if tenant is None:
            raise MillraceError(Reason.UNAUTHENTICATED, "the API key is unknown: send a valid one")
        return tenant

    @property
    def names(self) -> Set[str]:
        """The names of the tenants of the latest file that could be used."""
        return {tenant.name for tenant in self._file.get().values()}

    def _load(self, path: Path) -> Mapping[str, Tenant]:
        """By the hash of the key."""
        keys, now = read(path), self._clock()
        self._tenants = {key.name: _tenant(key, self._tenants.get(key.name), now) for key in keys}
        return {key.sha256: self._tenants[key.name] for key in keys}


def read(path: Path) -> tuple[ApiKey, ...]:
    """Raises ValueError or OSError with the place of the mistake, never with a value of the file."""
    data = path.read_bytes()
    try:
        values = yaml.safe_load(data)
    except Exception:  # many kinds, some with values: a date of month 13, `!!int x`, too deep
        raise ValueError(f"{path} is not YAML") from None
    try:
        return KeyFile.model_validate(values).keys
    except ValidationError as error:
        places = (
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_input=False)
        )
        raise ValueError(f"{path}: {'; '.join(places)}") from None


def new_key() -> tuple[str, str]:
    """A random key, and its hash."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, _sha256(key)


def _tenant(key: ApiKey, before: Tenant | None, now: float) -> Tenant:
    """When the file changes, the rest of a rate is kept, and running requests are counted in the same bucket."""
    requests = _bucket(key.requests_per_s, key.requests_burst, before.requests if before else None, now)
    tokens = _bucket(key.tokens_per_s, key.tokens_burst, before.tokens if before else None, now)
    running = before.running if before else Running()
    running.max_concurrent, running.max_tokens = key.max_concurrent, key.max_tokens_in_flight
    group = f"tenant {key.name}" if key.cache_group is None else f"group {key.cache_group}"
    return Tenant(key.name, key.weight, key.priority, requests, tokens, group, running, key.slo.slo)


def _bucket(rate: float | None, burst: float | None, before: Bucket | None, now: float) -> Bucket | None:
    if rate is None:
        return None
    size = burst or max(BURST_S * rate, 1.0)
    if before is None:
        return Bucket(rate, size, now)
    before.resize(rate, size, now)
    return before


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
