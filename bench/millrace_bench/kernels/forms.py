"""Where absorbing a cached prefix stops being faster than expanding it: `model.attn_step.FormThresholds`.

One layer's attention of V3 is timed for a prompt chunk of q queries behind a cached prefix, launched op by op as in a
step with prompt chunks. The time contains all projections and, in the expanded form, the gathering and up-projection of
the prefix. Kernels' plans are made once per step and are not timed.

python -m millrace_bench.kernels.forms [--heads 16 128] [--prefix 1024 4096] [--queries 16 64] [--out FILE]
python -m millrace_bench.kernels.forms --tiny        small widths on a CPU, to see that it runs

`break_even` of the JSON: by heads and prefix, the number of queries from which on the expanded form is faster,
interpolated between the two numbers that were measured; null: the absorbed form always was.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from millrace_kernels.fp8 import Operand
from millrace_kernels.mla_prefill import Heads
from millrace_kernels.scratch import Scratch
from millrace_load.options import CommandLine, number
from millrace_load.record import Record, print_record
from millrace_serve.model.attn_step import FORMS, AttnStep, FormThresholds, prefix_chunk_tokens
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.mla import Mla
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8, PLAIN
from millrace_serve.model.yarn import rope_tables
from torch import Tensor

from millrace_bench import v3
from millrace_bench.shard import PAGE, step_inputs, time_ms

HEADS, TINY_HEADS = (16, 128), (2, 8)
PREFIXES, TINY_PREFIXES = (1024, 2048, 4096, 8192, 16384, 32768), (128, 256)
QUERIES, TINY_QUERIES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048), (8, 64)


class Layer:
    """The attention of one layer with random weights, and a pool for its sequences."""

    def __init__(self, heads: int, tokens: int, device: torch.device, widths: dict[str, Any]) -> None:
        self.config = ModelConfig(num_hidden_layers=1, **widths)
        dims = ParallelDims(tp=self.config.num_attention_heads // heads)
        weights = RandomWeights(device, torch.bfloat16, FP8 if device.type == "cuda" else PLAIN)
        self.mla = Mla(weights, self.config, dims, 0)
        self.heads = Heads(heads, self.config.qk_head_dim, self.config.v_head_dim)
        self.tables, self.scratch, self.device = rope_tables(self.config, device), Scratch(device), device
        self.pages = -(-tokens // PAGE)
        self.kv = torch.randn(self.pages + 1, PAGE, self.config.kv_row_dim, device=device, dtype=torch.bfloat16)

    def call(self, prefix: int, queries: int, form: FormThresholds, sequences: int = 1) -> Callable[[], Tensor]:
        """The layer for the last `queries` tokens of each sequence, behind `prefix` ones. Results -> [T, D]."""
        tokens, table = torch.zeros(sequences * queries, dtype=torch.int64), torch.arange(1, self.pages + 1)
        lens = (queries,) * sequences, (prefix + queries,) * sequences
        inputs = step_inputs(tokens, *lens, 0, table.view(sequences, -1), self.device)
        step = AttnStep.prepare(inputs, self.tables, form, self.heads, self.kv, torch.bfloat16)
        rng = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(len(tokens), self.config.hidden_size, generator=rng, device=self.device).bfloat16()

        @torch.inference_mode()
        def call() -> Tensor:
            with self.scratch.step():
                return self.mla(Operand(x, None), step, self.kv)

        return call


def break_even(absorbed: dict[int, float], expanded: dict[int, float]) -> float | None:
    """The number of queries where the two meet, linear between measured ones; the smallest one where expanding always
    wins; None where absorbing always does. After the last crossing expanding stays ahead.
    """
    queries = sorted(absorbed)
    ahead = [expanded[q] < absorbed[q] for q in queries]
    if not ahead[-1]:
        return None
    last = max((i for i, wins in enumerate(ahead) if not wins), default=-1)
    if last < 0:
        return queries[0]
    low, high = queries[last], queries[last + 1]
    before, after = expanded[low] - absorbed[low], absorbed[high] - expanded[high]
    return round(low + (high - low) * before / (before + after), 1)


def main() -> None:
    parser = CommandLine("python -m millrace_bench.kernels.forms", "Absorbed and expanded attention of prompt chunks.")
    parser.add_argument("--heads", type=int, nargs="+", help="heads of a rank: 16 is TP8 of V3, 128 is DP")
    parser.add_argument("--prefix", type=number(int), nargs="+", help="cached tokens")
    parser.add_argument("--queries", type=int, nargs="+", help="tokens of the chunk")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small widths on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    widths = {**v3.V3, **(v3.TINY if args.tiny else {})}
    prefixes = args.prefix or (TINY_PREFIXES if args.tiny else PREFIXES)
    queries = args.queries or (TINY_QUERIES if args.tiny else QUERIES)
    rows, crossings = [], []
    for heads in args.heads or (TINY_HEADS if args.tiny else HEADS):
        layer = Layer(heads, max(prefixes) + max(queries), device, widths)
        for prefix in prefixes:
            times: dict[str, dict[int, float]] = {form: {} for form in FORMS}
            for form, num in itertools.product(FORMS, queries):
                thresholds = replace(FORMS[form], prefix_chunk_tokens=prefix_chunk_tokens(heads))
                call = layer.call(prefix, num, thresholds)
                times[form][num] = round(statistics.median(time_ms(call, args.repeats, device)), 4)
                rows.append({"heads": heads, "prefix": prefix, "queries": num, "form": form, "ms": times[form][num]})
            crossings.append({"heads": heads, "prefix": prefix, "queries": break_even(**times)})
            print(crossings[-1], times, flush=True)
    print_record(Record("forms", vars(args), {"rows": rows, "break_even": crossings}))


if __name__ == "__main__":
    main()
