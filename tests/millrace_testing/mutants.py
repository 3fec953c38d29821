"""Deliberate breaks, one line each: does a test notice? `python -m millrace_testing.mutants`

Those of engine and kernels are here, others in the modules mutants_*.py beside this one.

The tree is copied once; each break is made in the copy, its tests run there until one fails, and it is taken back. The
exit code is 1 when a break survives, or when its fragment is no longer found exactly once.
"""

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


def of(file: str, tests: str | tuple[str, ...], *breaks: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """The breaks of a file that the same tests notice: a name, the fragment, and what it becomes."""
    paths = tuple(f"tests/{test}" for test in ((tests,) if isinstance(tests, str) else tests))
    return tuple(Mutant(name, file, old, new, paths) for name, old, new in breaks)


SCHEDULERS = ("engine/schedule/test_schedulers.py", "engine/schedule/test_machines.py")
CACHE = ("engine/cache/test_pages.py", "engine/schedule/test_machines.py", "engine/schedule/test_schedulers.py")
IMPORTS = ("transfer",)
DRAFTS = ("engine/step/test_accept.py", "engine/step/test_drafts.py")
MUTANTS = (
    # scheduling
    *of(f"{ENGINE}/schedule/scheduler.py", SCHEDULERS,
        ("last-token-cached", "at_least_one_token = 0 if imports else 1", "at_least_one_token = 0"),
        ("decode-first-token-twice", "seq.set_computed(len(seq.request.token_ids))",
         "seq.set_computed(len(seq.tokens))")),
    *of(f"{ENGINE}/schedule/leaving.py", SCHEDULERS,
        ("prefill-settles-early", "if seq.inflight:  # aborted an instant ago", "if False:  # aborted an instant ago"),
        ("prefill-published-pages-go", "if phase is Phase.DONE and seq.num_published:", "if False:")),
    *of(f"{ENGINE}/schedule/exports.py", SCHEDULERS,
        ("prefill-held-unlimited", "return not held or self._most is None or", "return True or")),
    *of(f"{ENGINE}/schedule/streams.py", SCHEDULERS,
        ("decode-preempts-the-oldest", "victim = max((*self._ready", "victim = min((*self._ready")),
    *of(f"{ENGINE}/schedule/scheduler.py", (*DRAFTS, *SCHEDULERS),
        ("decode-forgets-the-bound", "seq.num_reserved = min(written + seq.inflight * self._num_queries, seq.capacity)",
         "seq.num_reserved = min(written, seq.capacity)")),
    *of(f"{ENGINE}/schedule/pages.py", CACHE,
        ("pages-capacity-one-short", "seq.capacity = min(len(seq.pages) * self.size, seq.limit - 1)",
         "seq.capacity = min(len(seq.pages) * self.size - 1, seq.limit - 1)"),
        ("pages-trust-everything", "if seq.trust is Trust.PROVEN:", "if True:"),
        ("pages-slot-leaks", "self._slots.append(seq.slot)", "pass")),
    # the cache
    *of(f"{ENGINE}/cache/radix.py", CACHE,
        ("radix-evicts-the-youngest", "next(iter(self._idle[min(self._idle)]))",
         "next(reversed(self._idle[min(self._idle)]))"),
        ("radix-ignores-the-salt", "return page if index else (salt, page)", "return page"),
        ("radix-forgets-anothers-block", "if self._by_block.get(node.block) is node:", "if True:")),
    *of(f"{ENGINE}/cache/radix.py", ("engine/schedule/test_served_pages.py", *CACHE),
        ("radix-ignores-the-parent", "if node is None or node.parent is not (path[-1] if path else self.root):",
         "if node is None:")),
    *of("proto/millrace_common/page_hash.py", ("engine/cache/test_page_identity.py", *CACHE),
        ("blocks-ignore-the-salt", "first_link(salt) if prev is None", 'first_link(b"") if prev is None')),
    *of(f"{ENGINE}/cache/kv_cache.py", CACHE,
        ("cache-duplicate-is-not-pinned", "prefix.pins.append(prefix.tail.page)", "pass"),
        ("cache-pins-are-not-held", "self.pool.hold(prefix.pins, Holder.PUBLISHED)", "pass")),
    *of(f"{ENGINE}/cache/block_pool.py", CACHE,
        ("pool-page-is-not-freed", "self.freed.append(page)", "pass")),
    # the fences of a transfer
    *of(f"{TRANSFER}/lease.py", IMPORTS,
        ("lease-parts-are-not-open", "self._open.add(chunk.id)", "pass"),
        ("lease-renewed-for-ever", "deadline.at = min(self._clock() + self._lease_s, deadline.last)",
         "deadline.at = self._clock() + self._lease_s"),
        ("lease-always-held", "held = id in self._published", "held = True")),
    *of(f"{TRANSFER}/importer.py", IMPORTS,
        ("import-hashes-unchecked", "if ours != theirs:", "if False:"),
        ("import-over-with-reads-in-flight", "if self._outstanding and self.state is not ImportState.DRAINING:",
         "if False:"),
        ("import-duplicate-part-taken", "if chunk.first_page < len(self._src_pages):", "if False:"),
        ("import-releases-too-early", "if self._complete and not self._outstanding:", "if self._complete:"),
        ("import-reads-cached-pages", "self._num_asked = num_cached_pages", "self._num_asked = 0")),
    # sampling
    *of(f"{ENGINE}/step/sampling.py", ("engine/step/test_drafts_sampling.py", "engine/step/test_sampling.py"),
        ("penalties-count-rejected-drafts", "accepted[samples].to(self._counts.dtype)",
         "1 | accepted[samples].to(self._counts.dtype)")),
    *of(f"{ENGINE}/step/sampling.py", "engine/step/test_sampling.py",
        ("bias-for-ever", "output_index[bias.samples] >= bias.until", "output_index[bias.samples] >= 1 << 40"),
        ("logprobs-behind-penalties", "raw = torch.log_softmax(logits, dim=-1) if host.num_logprobs >= 0 else None",
         "raw = logits if host.num_logprobs >= 0 else None")),
    *of(f"{ENGINE}/step/sampling.py", ("engine/step/test_sampling.py", "engine/grammar/test_grammar.py"),
        ("grammar-mask-upside-down", "masked_fill(allowed == 0, -torch.inf)", "masked_fill(allowed != 0, -torch.inf)")),
    # drafts
    *of(f"{KERNELS}/accept_drafts.py", DRAFTS,
        ("accept-without-room", "out[0] = torch.minimum(_leading(held) + 1, room)", "out[0] = _leading(held) + 1"),
        ("accept-behind-a-refused-draft", "held.long().cumprod(1).sum(1)", "held.long().sum(1)")),
    *of(f"{KERNELS}/triton/accept_drafts.py", ("kernels/test_decode_step.py", *DRAFTS),
        ("accept-kernel-without-room", "counts = tl.minimum(leading + 1, room)", "counts = leading + 1")),
    *of(f"{ENGINE}/step/slots.py", ("engine/step/test_slots.py", "engine/step/test_sampling.py"),
        ("output-index-of-the-input", "return positions + 1 - self.num_prompt", "return positions - self.num_prompt")),
    *of(f"{ENGINE}/step/slots.py", ("engine/step/test_slots.py", "engine/step/test_drafts_kv.py"),
        ("rows-behind-the-capacity", "kv_slots.masked_fill_(positions >= self.capacity[step.slots][seq_of_row], 0)",
         "pass")),
    # experts
    *of(f"{MODEL}/moe.py", "model/test_padding.py",
        ("gate-without-padding-on-gpus", "*self.gate(h.plain, inputs.num_tokens)", "*self.gate(h.plain, None)")),
    *of(f"{MODEL}/experts/gather.py", "model/test_padding.py",
        ("padding-chooses-expert-0", "gather(F.pad(ids, pad, value=-1))", "gather(F.pad(ids, pad, value=0))")),
    # kernels
    *of(f"{KERNELS}/triton/mla_qkv.py", "kernels/test_triton_attention.py",
        ("cached-rows-overflow", "x = saturated(x)", "pass")),
    *of(f"{KERNELS}/merge_state.py", "kernels/test_attention.py",
        ("merge-of-nothing-is-nan", "base = lse.masked_fill(lse == -torch.inf, 0.0)", "base = lse")),
    *of(f"{KERNELS}/triton/merge_state.py", "kernels/test_triton_attention.py",
        ("merge-kernel-base", "base + tl.log(total), float", "tl.log(total), float")),
    *of(f"{KERNELS}/triton/kv_gather.py", "kernels/test_triton_attention.py",
        ("gather-kernel-reads-on", "tl.minimum(rows, PAGE) * WIDTH", "PAGE * WIDTH")),
    *of(f"{KERNELS}/triton/rope.py", "kernels/test_triton_attention.py",
        ("rope-kernel-sign", "even * cos - odd * sin", "even * cos + odd * sin")),
    *of(f"{MODEL}/deepseek_v3.py", "model/test_padding.py",
        ("model-without-scratch", "with self.scratch.step():", "if True:")),
    *of(f"{MODEL}/mla.py", "model/test_padding.py",
        ("two-products-of-h", "linear(h, self.q_kv_a_proj),",
         "torch.cat([linear(h, part) for part in self.q_kv_a_proj.split(16)], -1),")),
    # the start
    *of(f"{ENGINE}/start/startup.py", "engine/start/test_start.py",
        ("start-without-products",
         "runner.call(lambda: fp8.compile_ahead(most, setup.device))", "pass"),
        ("start-without-freeze", "gc_hooks.freeze()", "pass")),
    *of(f"{ENGINE}/step/graphs.py", "engine/start/test_start.py",
        ("captures-with-collector", "gc.disable()", "pass")),
    *of(f"{ENGINE}/step/graphs.py", "engine/step/test_graphs.py",
        ("graph-rows-are-not-counted", "self._num_rows.copy_(step.num_rows)", "pass")),
    # the watch over ranks
    *of(f"{ENGINE}/health/rank_watch.py", "engine/health/test_rank_watch.py",
        ("watch-ignores-silence", "if not one.heartbeat.doing and one.silent_s > LEAST_S:", "if False:"),
        ("watch-ignores-starvation", "self._lived + passed * (1 - self.starved)", "now"),
        ("watch-names-the-first", "behind = min(ranks[rank].heartbeat.launched for rank in stuck)",
         "behind = max(ranks[rank].heartbeat.launched for rank in stuck)")),
    *of("proto/millrace_common/pace.py", "common/test_starvation.py",
        ("starvation-of-the-luckiest", "min(max((now.lost_s", "min(min((now.lost_s")),
    *of(f"{ENGINE}/health/progress.py", "engine/health/test_progress.py",
        ("progress-busy-is-slow", "if tokens and not long_operation:", "if tokens:")),
    *of(f"{ENGINE}/step/forecast.py", "engine/step/test_forecast.py",
        ("forecast-of-the-slowest", "seconds = min(", "seconds = max(")),
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
    command += ["--timeout=120", "-k", "not golden and not what_the_generator_writes"]  # golden files notice all
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
