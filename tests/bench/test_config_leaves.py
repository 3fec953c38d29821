"""How the keys of configurations are counted; tests/test_sizes.py has the limit."""

from millrace_bench.config_leaves import FILES, leaves
from millrace_common.config import Config
from millrace_common.tls_config import Tls


class Part(Config):
    a: int = 1
    b: tuple[int, ...] = ()


class Whole(Config):
    x: str = ""
    one: Part = Part()
    many: tuple[Part, ...] = ()
    tls: Tls | None = None


def test_nested_models_are_counted_in_every_place() -> None:
    tls = [f"tls.{name}" for name in Tls.model_fields]
    assert list(leaves(Whole)) == ["x", "one.a", "one.b", "many.a", "many.b", *tls]


def test_keys_of_every_file_are_listed() -> None:
    keys = {file: list(leaves(model)) for file, model in FILES.items()}
    assert (
        "limits.page_size" in keys["worker"]
        and "discovery.kubernetes.selector" in keys["router"]
        and "keys.name" in keys["API keys"]
    )
