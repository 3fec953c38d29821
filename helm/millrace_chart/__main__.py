"""`make golden`: write values.schema.json and k8s/golden."""

import sys

from millrace_chart.render import GOLDEN, ChartError, presets, written


def main() -> int:
    for old in set(GOLDEN.glob("*.yaml")) - {GOLDEN / f"{name}.yaml" for name in presets()}:
        old.unlink()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in written():
            path.write_text(text)
    except ChartError as error:
        print(f"golden: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
