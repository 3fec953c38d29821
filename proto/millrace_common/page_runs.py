"""Pages that are neighbours on both sides of a copy travel as one."""

from collections.abc import Iterator, Sequence


def runs(src_pages: Sequence[int], dst_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(src, dst, count) of pages that are adjacent on both sides, in order."""
    first, count = 0, 0
    for src, dst in zip(src_pages, dst_pages, strict=True):
        if count and src == src_pages[first] + count and dst == dst_pages[first] + count:
            count += 1
            continue
        if count:
            yield src_pages[first], dst_pages[first], count
        first, count = first + count, 1
    if count:
        yield src_pages[first], dst_pages[first], count
