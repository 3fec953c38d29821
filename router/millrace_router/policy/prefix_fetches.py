"""Whether a prefill worker should fetch leading pages of a prompt from another worker, or compute them. Pure.

    fetch   = the fetching worker's prefix fetch without its reads + bytes / bytes per second of reads
    compute = tokens / the fetching worker's prompt tokens per second

Workers report what they measure (LoadSnapshot); where the fetching worker has read nothing yet, the source's reads
count. Until something has been measured the start values below favour computing.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from millrace_common.step_times import prompt_pairs

from millrace_router.policy.holders import Process
from millrace_router.policy.snapshot import MOST_CHUNK, PlacementRequest, PrefixFetch, Replica

START_TOKENS_PER_S = 50_000.0  # more than a replica of a large model computes
START_BYTES_PER_S = 1e9  # less than any network for KV reads at
START_PREFIX_FETCH_S = 0.02
# A slow spell is believed up to here: without prefix fetches nobody would notice its end.
MOST_PREFIX_FETCH_S = 0.1

# A replica and the leading tokens of the prompt that it has, the most first.
PrefixSources = Sequence[tuple[int, Replica]]


def prefix_sources(replicas: Iterable[Replica], pages: Mapping[Process, int], want: PlacementRequest) -> PrefixSources:
    """`pages`: leading pages of the prompt on the devices of these replicas."""
    if not pages:
        return ()
    most, size, number = want.cached(want.tokens), want.page_size, pages.get
    rows = [(n * size, r) for r in replicas if (n := number((r.epoch, r.index))) is not None and not r.excluded]
    found = [(min(tokens, most), r) for tokens, r in rows]  # few of the replicas
    return sorted(found, key=itemgetter(0), reverse=True)


def best_prefix_fetch(
    fetcher: Replica, own: int, want: PlacementRequest, prefix_sources: PrefixSources
) -> PrefixFetch | None:
    """From the replica of the same view with most tokens. None: nobody has more than the fetching worker's own."""
    for tokens, source in prefix_sources:
        if tokens <= own:
            return None
        if _compatible(source, fetcher):
            fetch_s, compute_s = _seconds(fetcher, source, own, tokens - own, want.page_size)
            return PrefixFetch(source, tokens // want.page_size, tokens - own, fetch_s, compute_s)
    return None


def saved(
    fetchers: Sequence[Replica], own: Sequence[int], want: PlacementRequest, prefix_sources: PrefixSources
) -> Sequence[float]:
    """Prompt tokens that each fetching worker need not compute: its own, and those of its best fetch less its price."""
    if not prefix_sources:
        return own
    most, found = prefix_sources[0][0], list[float](own)
    for i, fetcher in enumerate(fetchers):
        for tokens, source in prefix_sources if own[i] < most else ():
            missing = tokens - own[i]
            if missing <= 0:
                break
            if _compatible(source, fetcher):
                fetch_s, compute_s = _seconds(fetcher, source, own[i], missing, want.page_size)
                if fetch_s < compute_s:
                    found[i] = tokens - missing * fetch_s / compute_s
                break
    return found


def _compatible(source: Replica, fetcher: Replica) -> bool:
    return source is not fetcher and source.fingerprint == fetcher.fingerprint


def _seconds(fetcher: Replica, source: Replica, own: int, missing: int, page_size: int) -> tuple[float, float]:
    """To fetch the tokens behind its `own`, and to compute them."""
    speed = fetcher.read_bytes_per_s
    if source.read_bytes_per_s > speed:
        speed = source.read_bytes_per_s
    prefix_fetch_s = fetcher.prefix_fetch_s or START_PREFIX_FETCH_S
    if prefix_fetch_s > MOST_PREFIX_FETCH_S:
        prefix_fetch_s = MOST_PREFIX_FETCH_S
    fetch_s = prefix_fetch_s + missing / page_size * fetcher.page_bytes / (speed or START_BYTES_PER_S)
    if not (times := fetcher.times).token_s:
        return fetch_s, missing / START_TOKENS_PER_S
    steps_s = times.step_s(tokens=MOST_CHUNK) * missing / MOST_CHUNK
    return fetch_s, steps_s + times.pair_s * prompt_pairs(own, missing, MOST_CHUNK)
