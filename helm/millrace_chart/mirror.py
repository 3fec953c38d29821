"""`make mirror`: list every image that a release pulls, as Helm renders the values.

A line is an image. With a registry, a line is an image and its copy, which the release pulls when `images.registry` is
that registry. Our own images have the names that `make images` gives them without a registry.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from millrace_chart.render import ChartError, objects, template

HOST = re.compile("^([^/]*[.:][^/]*|localhost)/")  # of a registry, at the beginning of an image's name
ORIGINALS = ("images.registry=", "images.gpuWorker.pullPolicy=Never")  # the chart's way to do without a registry


def images(node: Any) -> Iterator[str]:
    """Yield the images of all containers in manifests, whatever kind of object has them."""
    if isinstance(node, list):
        for item in node:
            yield from images(item)
    elif isinstance(node, dict):
        for key in ("initContainers", "containers"):
            yield from (container["image"] for container in node.get(key) or ())
        for value in node.values():
            yield from images(value)


def pulled(files: tuple[Path, ...], sets: tuple[str, ...]) -> list[str]:
    """Return the images of a release, sorted. Raises ChartError when Helm refuses the values."""
    return sorted(set(images(objects(template(files, sets)))))


def copies(files: tuple[Path, ...], sets: tuple[str, ...], registry: str) -> list[tuple[str, str]]:
    """Return each image with its copy, as the release names it; the same twice where the values name a registry."""
    originals = pulled(files, (*sets, *ORIGINALS))
    if not registry:
        return list(zip(originals, originals, strict=True))
    found = []
    for copy in pulled(files, (*sets, f"images.registry={registry}")):
        path = "/" + copy.removeprefix(registry.rstrip("/") + "/")
        found.append((next(name for name in originals if f"/{name}".endswith(path)), copy))
    return found


def others(files: Sequence[Path], registry: str) -> list[tuple[str, str]]:
    """Return the images of manifests that are not the chart's, with copies that have the same path in the registry."""
    found = {name for file in files for name in images(list(yaml.safe_load_all(file.read_text())))}
    return [(name, f"{registry.rstrip('/')}/{HOST.sub('', name)}") for name in sorted(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mirror", description=__doc__)
    parser.add_argument("--registry", default="", help="registry and path, as in registry.local/millrace")
    parser.add_argument("-f", "--values", type=Path, action="append", default=[], help="file, as for helm install")
    parser.add_argument("--set", action="append", default=[], help="value, as for helm install")
    parser.add_argument("--manifests", type=Path, action="append", default=[], help="other things to install")
    args = parser.parse_args(arguments)
    try:
        pairs = copies(tuple(args.values), tuple(args.set), args.registry) + others(args.manifests, args.registry)
    except ChartError as error:
        print(f"mirror: {error}", file=sys.stderr)  # noqa: T201
        return 1
    sys.stdout.writelines(f"{name} {copy}\n" if args.registry else f"{name}\n" for name, copy in pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
