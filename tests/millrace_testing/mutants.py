"""Deliberate breaks, one line each: does a test notice? `python -m millrace_testing.mutants`

Those of engine and kernels are here, others in the modules mutants_*.py beside this one.

The tree is copied once; each break is made in the copy, its tests run there until one fails, and it is taken back. The
exit code is 1 when a break survives, or when its fragment is no longer found exactly once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0  # of the tests of one break; a test that hangs has noticed it
ENGINE, MODEL, KERNELS = "services/millrace_serve/engine", "services/millrace_serve/model", "kernels/millrace_kernels"
TRANSFER, FRONTEND = "services/millrace_serve/transfer", "services/millrace_serve/worker/frontend"
GONE = "no longer found exactly once"
KILLED, SURVIVED = "killed", "SURVIVED"


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str  # a fragment of one line, found once in the file
    new: str
    tests: tuple[str, ...]


def of(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, file, old, new, tuple(f"tests/{test}" for test in tests))


SCHEDULERS = ("engine/schedule/test_schedulers.py", "engine/schedule/test_machines.py")
CACHE = ("engine/cache/test_pages.py", "engine/schedule/test_machines.py", "engine/schedule/test_schedulers.py")
IMPORTS = ("transfer",)
DRAFTS = ("engine/step/test_accept.py", "engine/step/test_drafts.py")
MUTANTS = (
    # scheduling
    of("last-token-cached", f"{ENGINE}/schedule/scheduler.py",
       "at_least_one_token = 0 if imports else 1", "at_least_one_token = 0", *SCHEDULERS),
    of("prefill-settles-early", f"{ENGINE}/schedule/leaving.py",
       "if seq.inflight:  # aborted an instant ago", "if False:  # aborted an instant ago", *SCHEDULERS),
    of("prefill-published-pages-go", f"{ENGINE}/schedule/leaving.py",
       "if phase is Phase.DONE and seq.num_published:", "if False:", *SCHEDULERS),
    of("prefill-held-unlimited", f"{ENGINE}/schedule/exports.py",
       "return not held or self._most is None or", "return True or", *SCHEDULERS),
    of("decode-preempts-the-oldest", f"{ENGINE}/schedule/streams.py",
       "victim = max((*self._ready", "victim = min((*self._ready", *SCHEDULERS),
    of("decode-forgets-the-bound", f"{ENGINE}/schedule/streams.py",
       "seq.num_reserved = min(written + seq.inflight * self._num_queries, seq.capacity)",
       "seq.num_reserved = min(written, seq.capacity)", *DRAFTS, *SCHEDULERS),
    of("decode-first-token-twice", f"{ENGINE}/schedule/scheduler.py",
       "seq.set_computed(len(seq.request.token_ids))", "seq.set_computed(len(seq.tokens))", *SCHEDULERS),
    of("pages-capacity-one-short", f"{ENGINE}/schedule/pages.py",
       "seq.capacity = min(len(seq.pages) * self.size, seq.limit - 1)",
       "seq.capacity = min(len(seq.pages) * self.size - 1, seq.limit - 1)", *CACHE),
    of("pages-trust-everything", f"{ENGINE}/schedule/pages.py",
       "if seq.trust is Trust.PROVEN:", "if True:", *CACHE),
    of("pages-slot-leaks", f"{ENGINE}/schedule/pages.py",
       "self._slots.append(seq.slot)", "pass", *CACHE),
    # the cache
    of("radix-evicts-the-youngest", f"{ENGINE}/cache/radix.py",
       "next(iter(self._idle[min(self._idle)]))", "next(reversed(self._idle[min(self._idle)]))", *CACHE),
    of("radix-ignores-the-parent", f"{ENGINE}/cache/radix.py",
       "if node is None or node.parent is not (path[-1] if path else self.root):", "if node is None:",
       "engine/schedule/test_served_pages.py", *CACHE),
    of("radix-ignores-the-salt", f"{ENGINE}/cache/radix.py",
       "return tuple(page) if index else (salt, *page)", "return tuple(page)", *CACHE),
    of("radix-forgets-anothers-block", f"{ENGINE}/cache/radix.py",
       "if self._by_block.get(node.block) is node:", "if True:", *CACHE),
    of("blocks-ignore-the-salt", "proto/millrace_common/page_hash.py",
       "first_link(salt) if prev is None", 'first_link(b"") if prev is None',
       "engine/cache/test_page_identity.py", *CACHE),
    of("cache-duplicate-is-not-pinned", f"{ENGINE}/cache/kv_cache.py",
       "prefix.pins.append(prefix.tail.page)", "pass", *CACHE),
    of("cache-pins-are-not-held", f"{ENGINE}/cache/kv_cache.py",
       "self.pool.hold(prefix.pins, Holder.PUBLISHED)", "pass", *CACHE),
    of("pool-page-is-not-freed", f"{ENGINE}/cache/block_pool.py",
       "self.freed.append(page)", "pass", *CACHE),
    # the fences of a transfer
    of("lease-parts-are-not-open", f"{TRANSFER}/lease.py", "self._open.add(chunk.id)", "pass", *IMPORTS),
    of("lease-renewed-for-ever", f"{TRANSFER}/lease.py",
       "deadline.at = min(self._clock() + self._lease_s, deadline.last)", "deadline.at = self._clock() + self._lease_s",
       *IMPORTS),
    of("lease-always-held", f"{TRANSFER}/lease.py", "held = id in self._published", "held = True", *IMPORTS),
    of("import-hashes-unchecked", f"{TRANSFER}/importer.py", "if ours != theirs:", "if False:", *IMPORTS),
    of("import-over-with-reads-in-flight", f"{TRANSFER}/importer.py",
       "if self._outstanding and self.state is not ImportState.DRAINING:", "if False:", *IMPORTS),
    of("import-duplicate-part-taken", f"{TRANSFER}/importer.py",
       "if chunk.first_page < len(self._src_pages):", "if False:", *IMPORTS),
    of("import-releases-too-early", f"{TRANSFER}/importer.py",
       "if self._complete and not self._outstanding:", "if self._complete:", *IMPORTS),
    of("import-reads-cached-pages", f"{TRANSFER}/importer.py",
       "self._num_asked = num_cached_pages", "self._num_asked = 0", *IMPORTS),
    # sampling
    of("penalties-count-rejected-drafts", f"{ENGINE}/step/sampling.py",
       "accepted[samples].to(self._counts.dtype)", "1 | accepted[samples].to(self._counts.dtype)",
       "engine/step/test_drafts_sampling.py", "engine/step/test_sampling.py"),
    of("bias-for-ever", f"{ENGINE}/step/sampling.py",
       "output_index[bias.samples] >= bias.until", "output_index[bias.samples] >= 1 << 40",
       "engine/step/test_sampling.py"),
    of("logprobs-behind-penalties", f"{ENGINE}/step/sampling.py",
       "raw = torch.log_softmax(logits, dim=-1) if host.num_logprobs >= 0 else None",
       "raw = logits if host.num_logprobs >= 0 else None", "engine/step/test_sampling.py"),
    of("grammar-mask-upside-down", f"{ENGINE}/step/sampling.py",
       "masked_fill(allowed == 0, -torch.inf)", "masked_fill(allowed != 0, -torch.inf)",
       "engine/step/test_sampling.py", "engine/grammar/test_grammar.py"),
    # drafts
    of("accept-without-room", f"{KERNELS}/accept_drafts.py",
       "out[0] = torch.minimum(_leading(held) + 1, room)", "out[0] = _leading(held) + 1", *DRAFTS),
    of("accept-behind-a-refused-draft", f"{KERNELS}/accept_drafts.py", "held.long().cumprod(1).sum(1)",
       "held.long().sum(1)", *DRAFTS),
    of("accept-kernel-without-room", f"{KERNELS}/triton/accept_drafts.py",
       "counts = tl.minimum(leading + 1, room)", "counts = leading + 1", "kernels/test_decode_step.py", *DRAFTS),
    of("output-index-of-the-input", f"{ENGINE}/step/slots.py",
       "return positions + 1 - self.num_prompt", "return positions - self.num_prompt",
       "engine/step/test_slots.py", "engine/step/test_sampling.py"),
    of("rows-behind-the-capacity", f"{ENGINE}/step/slots.py",
       "kv_slots.masked_fill_(positions >= self.capacity[step.slots][seq_of_row], 0)", "pass",
       "engine/step/test_slots.py",
       "engine/step/test_drafts_kv.py"),
    # experts
    of("gate-without-padding-on-gpus", f"{MODEL}/moe.py",
       "*self.gate(h.plain, inputs.num_tokens)", "*self.gate(h.plain, None)",
       "model/test_padding.py"),
    of("padding-chooses-expert-0", f"{MODEL}/experts/gather.py", "gather(F.pad(ids, pad, value=-1))",
       "gather(F.pad(ids, pad, value=0))",
       "model/test_padding.py"),
    # kernels
    of("cached-rows-overflow", f"{KERNELS}/triton/mla_qkv.py", "x = saturated(x)", "pass",
       "kernels/test_triton_attention.py"),
    of("merge-of-nothing-is-nan", f"{KERNELS}/merge_state.py",
       "base = lse.masked_fill(lse == -torch.inf, 0.0)", "base = lse", "kernels/test_attention.py"),
    of("merge-kernel-base", f"{KERNELS}/triton/merge_state.py",
       "base + tl.log(total), float", "tl.log(total), float", "kernels/test_triton_attention.py"),
    of("gather-kernel-reads-on", f"{KERNELS}/triton/kv_gather.py",
       "tl.minimum(rows, PAGE) * WIDTH", "PAGE * WIDTH", "kernels/test_triton_attention.py"),
    of("rope-kernel-sign", f"{KERNELS}/triton/rope.py",
       "even * cos - odd * sin", "even * cos + odd * sin", "kernels/test_triton_attention.py"),
    of("model-without-scratch", f"{MODEL}/deepseek_v3.py", "with self.scratch.step():", "if True:",
       "model/test_padding.py"),
    of("two-products-of-h", f"{MODEL}/mla.py", "linear(h, self.q_kv_a_proj),",
       "torch.cat([linear(h, part) for part in self.q_kv_a_proj.split(16)], -1),", "model/test_padding.py"),
    # the start
    of("start-without-products", f"{ENGINE}/start/startup.py",
       "runner.call(lambda: fp8.compile_ahead(profiling_run.most_rows(config, shapes), setup.device))", "pass",
       "engine/start/test_start.py"),
    of("start-without-freeze", f"{ENGINE}/start/startup.py", "gc_hooks.freeze()", "pass", "engine/start/test_start.py"),
    of("captures-with-collector", f"{ENGINE}/step/graphs.py", "gc.disable()", "pass", "engine/start/test_start.py"),
    of("graph-rows-are-not-counted", f"{ENGINE}/step/graphs.py",
       "self._num_rows.copy_(step.num_rows)", "pass", "engine/step/test_graphs.py"),
    # the watch over ranks
    of("watch-ignores-silence", f"{ENGINE}/health/rank_watch.py",
       "if not one.heartbeat.doing and one.silent_s > LEAST_S:", "if False:", "worker/test_rank_watch.py"),
    of("watch-ignores-starvation", f"{ENGINE}/health/rank_watch.py",
       "self._lived + passed * (1 - self.starved)", "now", "worker/test_rank_watch.py"),
    of("watch-names-the-first", f"{ENGINE}/health/rank_watch.py",
       "behind = min(ranks[rank].heartbeat.launched for rank in stuck)",
       "behind = max(ranks[rank].heartbeat.launched for rank in stuck)", "worker/test_rank_watch.py"),
    of("progress-busy-is-slow", f"{ENGINE}/health/progress.py",
       "if tokens and not long_operation:", "if tokens:", "engine/step/test_progress.py"),
    of("forecast-of-the-slowest", f"{ENGINE}/health/forecast.py",
       "seconds = min(", "seconds = max(", "engine/step/test_forecast.py"),
)  # fmt: skip


def everything() -> tuple[Mutant, ...]:
    """Of this module and of all that are called mutants_*."""
    found = (one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)]) if one.name.startswith("mutants_"))
    modules = [importlib.import_module(f"millrace_testing.{name}") for name in sorted(found)]
    return (*MUTANTS, *(one for module in modules for one in module.MUTANTS))


def lost(mutants: tuple[Mutant, ...], root: Path = ROOT) -> list[str]:
    """Names of those whose fragment is not there exactly once, or whose tests are not there."""
    return [
        one.name
        for one in mutants
        if (root / one.file).read_text().count(one.old) != 1
        or not all((root / test.partition("::")[0]).exists() for test in one.tests)
    ]


def copy_tree(to: Path) -> None:
    """Every file that git would commit, and what is generated."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    stubs = [str(path.relative_to(ROOT)) for path in (ROOT / "proto/millrace/v1").glob("*_pb2*")]
    for name in {*filter(None, listed), *stubs}:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for made in ("models/generated", ".venv"):  # helm is in .venv
        (to / made).symlink_to(ROOT / made)


def survives(one: Mutant, tree: Path) -> str:
    """Run the tests of a broken tree; KILLED, SURVIVED or GONE. The tree is whole again afterwards."""
    file = tree / one.file
    whole = file.read_text()
    if lost((one,), tree):
        return GONE
    paths = ("proto", "kernels", "services", "router", "bench", "models", "helm", "tests")
    settings = {"PYTHONPATH": os.pathsep.join(str(tree / path) for path in paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not long", "-p", "no:cacheprovider"]
    command += ["-k", "not golden and not what_the_generator_writes"]  # a copy of what is made notices everything
    file.write_text(whole.replace(one.old, one.new))
    try:
        ended = subprocess.run(
            [*command, *one.tests], cwd=tree, env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return KILLED
    finally:
        file.write_text(whole)
    if ended.returncode > 1:  # below 0 it crashed: a kernel wrote where it may not
        raise RuntimeError(f"{one.name}: pytest gave {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return KILLED if ended.returncode else SURVIVED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in everything()], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    wanted = [one for one in everything() if not options.only or one.name in options.only]
    with tempfile.TemporaryDirectory(prefix="millrace-mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            copy_tree(tree := Path(folder, str(job)))
            trees.put(tree)

        def run(one: Mutant) -> bool:
            tree, began = trees.get(), time.monotonic()
            try:
                outcome = survives(one, tree)
            finally:
                trees.put(tree)
            print(f"{one.name:34} {outcome:9} {time.monotonic() - began:6.1f} s", flush=True)  # noqa: T201
            return outcome == KILLED

        with ThreadPoolExecutor(options.jobs) as pool:
            killed = sum(pool.map(run, wanted))
    print(f"{killed} of {len(wanted)} killed")  # noqa: T201
    return int(killed < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
