"""Modules that a library compiles at their first use."""

import functools
import importlib
import re

LACKS = re.compile(r"[^\n]*(?:fatal error: [^\n]*No such file|cannot find -l)[^\n]*")


@functools.cache
def lacking(getter: str, *args: object) -> str:
    """What the CUDA toolkit lacks to build the module that `getter`, an `import.path:function`, loads: a line of the
    compiler or the linker. Empty: it is built.

    Raises: any other error of the build.
    """
    module, _, name = getter.partition(":")
    try:
        getattr(importlib.import_module(module), name)(*args)
    except RuntimeError as error:
        if found := LACKS.search(str(error)):
            return found[0].strip()
        raise
    return ""
