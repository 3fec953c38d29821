"""Whether a prefill worker should fetch leading pages of a prompt from another worker, or compute them. Pure.

    fetch   = the borrower's loan without its reads + bytes / bytes per second of reads
    compute = tokens / the borrower's prompt tokens per second

Workers report what they measure (LoadSnapshot); where the borrower has read nothing yet, the lender's reads count.
Until something has been measured the start values below favour computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from millrace_router.policy.holders import Process
from millrace_router.policy.snapshot import LoanOffer, Replica, Want

START_TOKENS_PER_S = 50_000.0  # more than a replica of a large model computes
START_BYTES_PER_S = 1e9  # less than any network for KV reads at
START_LOAN_S = 0.02
# A slow spell is believed up to here: without loans nobody would notice its end.
MOST_LOAN_S = 0.1

# A replica and the leading tokens of the prompt that it has, the most first.
Lenders = Sequence[tuple[int, Replica]]


def lenders(replicas: Iterable[Replica], pages: Mapping[Process, int], want: Want) -> Lenders:
    """`pages`: leading pages of the prompt on the devices of these replicas."""
    if not pages:
        return ()
    most, size, number = want.cached(want.tokens), want.page_size, pages.get
    rows = [(n * size, r) for r in replicas if (n := number((r.epoch, r.index))) is not None and not r.left_out]
    found = [(min(tokens, most), r) for tokens, r in rows]  # few of the replicas
    return sorted(found, key=itemgetter(0), reverse=True)


def best_loan(borrower: Replica, own: int, want: Want, lenders: Lenders) -> LoanOffer | None:
    """From the replica of the same view with most tokens. None: nobody has more than the borrower's own."""
    for tokens, lender in lenders:
        if tokens <= own:
            return None
        if _lends(lender, borrower):
            fetch_s, compute_s = _seconds(borrower, lender, tokens - own, want.page_size)
            return LoanOffer(lender, tokens // want.page_size, tokens - own, fetch_s, compute_s)
    return None


def saved(borrowers: Sequence[Replica], own: Sequence[int], want: Want, lenders: Lenders) -> Sequence[float]:
    """Prompt tokens that each borrower need not compute: its own, and those of its best loan less the loan's price."""
    if not lenders:
        return own
    most, found = lenders[0][0], list[float](own)
    for i, borrower in enumerate(borrowers):
        for tokens, lender in lenders if own[i] < most else ():
            missing = tokens - own[i]
            if missing <= 0:
                break
            if _lends(lender, borrower):
                fetch_s, compute_s = _seconds(borrower, lender, missing, want.page_size)
                if fetch_s < compute_s:
                    found[i] = tokens - missing * fetch_s / compute_s
                break
    return found


def _lends(lender: Replica, borrower: Replica) -> bool:
    return lender is not borrower and lender.fingerprint == borrower.fingerprint


def _seconds(borrower: Replica, lender: Replica, missing: int, page_size: int) -> tuple[float, float]:
    """To fetch the tokens, and to compute them."""
    speed = borrower.read_bytes_per_s
    if lender.read_bytes_per_s > speed:
        speed = lender.read_bytes_per_s
    loan_s = borrower.loan_s or START_LOAN_S
    if loan_s > MOST_LOAN_S:
        loan_s = MOST_LOAN_S
    fetch_s = loan_s + missing / page_size * borrower.page_bytes / (speed or START_BYTES_PER_S)
    return fetch_s, missing / (borrower.prompt_tokens_per_s or START_TOKENS_PER_S)
