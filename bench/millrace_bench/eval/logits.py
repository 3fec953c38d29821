"""Logits of a checkpoint on a device, in BF16 and with FP8 weights, against our model in FP32 on a CPU.

    millrace eval logits --device cuda

1. The FP8 variant of the BF16 checkpoint is exported to a temporary folder; its reference computes with the dequantised
   weights, so the rounding of the weights does not count.
2. Each held-out text runs once as one prompt, and once with its last tokens as steps of their own, as outputs are.
3. error = |difference| / |row| of a token's logits. The median over all tokens must stay within the tolerance of
   millrace_kernels.testing.tolerances.

Exit code 1 when one does not.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from millrace_cli.cluster import TINY
from millrace_kernels.testing.tolerances import TEXT_TOLERANCE
from millrace_load.options import CommandLine, checkpoint
from millrace_load.record import Record, print_record
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.model.checkpoint.export_quantised import export
from torch import Tensor

from millrace_bench.data import TEXTS
from millrace_bench.eval.perplexity import Logits, checkpoint_logits
from millrace_bench.eval.report import make_console, make_table

DECODED = 24  # tokens at the end of a text


@dataclass(frozen=True, slots=True)
class Line:
    weights: str
    path: str  # of the tokens that count
    tokens: int
    median: float  # error
    largest: float
    same_choice: float  # part of the tokens whose most likely successor is the same
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.median <= self.tolerance


def compare(weights: str, path: str, found: Tensor, wanted: Tensor, tolerance: float) -> Line:
    """float32 [T, V] both. NaN fails."""
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    same = (found.argmax(1) == wanted.argmax(1)).float().mean()
    return Line(weights, path, len(wanted), float(errors.median()), float(errors.max()), float(same), tolerance)


def lines(folder: Path, device: str, num_texts: int) -> list[Line]:
    encoded = asyncio.run(_encoded(folder, num_texts))
    found: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="millrace-logits-") as temporary:
        fp8 = Path(temporary) / "fp8"
        export(folder, fp8)
        for weights, where in (("BF16", folder), ("FP8", fp8)):
            wanted = _all(checkpoint_logits(where, "cpu", torch.float32, keep_quantised=False), encoded)
            for path, decoded in (("prompt", 0), ("outputs", DECODED)):
                keep = weights == "FP8"
                logits = checkpoint_logits(where, device, torch.bfloat16, keep_quantised=keep, decoded=decoded)
                pairs = zip(_all(logits, encoded), wanted, strict=True)
                both = [(one[-decoded:], other[-decoded:]) for one, other in pairs]  # [-0:] is the whole
                ours, theirs = (torch.cat(parts) for parts in zip(*both, strict=True))
                found.append(compare(weights, path, ours, theirs, TEXT_TOLERANCE[weights]))
    return found


def _all(logits: Logits, encoded: Sequence[list[int]]) -> list[Tensor]:
    return [logits(ids) for ids in encoded]


async def _encoded(folder: Path, num_texts: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(folder)
    return [await tokenizer.encode(text, add_bos=True) for text in TEXTS[:num_texts]]


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = CommandLine("millrace eval logits", __doc__)
    parser.add_argument("--checkpoint", type=checkpoint, metavar="DIR", default=TINY, help="of BF16 (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-texts", type=int, default=len(TEXTS), help="texts (%(default)s)")
    arguments = parser.parse_args(argv)
    found = lines(arguments.checkpoint, arguments.device, arguments.num_texts)
    title = f"{arguments.checkpoint} on {arguments.device}, error against FP32 on a CPU"
    table = make_table(title, "weights", "path", "tokens", "median", "tolerance", "largest", "same choice", "")
    for line in found:
        errors = (f"{value:.4f}" for value in (line.median, line.tolerance, line.largest, line.same_choice))
        table.add_row(line.weights, line.path, str(line.tokens), *errors, "ok" if line.passed else "FAILED")
    make_console().print(table)
    rows = [{**asdict(line), "passed": line.passed} for line in found]
    print_record(Record("eval logits", vars(arguments), {"rows": rows}))
    return int(not all(line.passed for line in found))
