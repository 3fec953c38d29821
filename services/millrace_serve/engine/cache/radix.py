"""Prefix cache: a tree of full pages, one node per page, keyed by the page's tokens; that of a first page by the salt
of its prompts, too. So a prompt finds pages of its own salt and tokens, whatever their blocks are. Prefix fetches,
which name pages by their block, find one node of each.

Nodes name physical pages but do not own them: engine/cache/kv_cache.py keeps the holders in the block pool, and marks
idle nodes (no sequence and no published prompt uses their page). Idle nodes are evicted in the order in which they
became idle, but those that are kept come last, the one whose time ends first before the others. A user of a node uses
its parents too, keeps them as long, and leaves the deepest first; so a parent is never evicted before its children.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millrace_serve.engine.cache.changes import BlockChanges

Key = bytes | tuple[bytes, bytes]


@dataclass(slots=True, eq=False)
class Node:
    parent: "Node | None"
    key: Key  # the page's tokens (u32), after the salt on a first page
    page: int
    block: bytes  # millrace_common/page_hash.py; of the root: empty
    salt: bytes  # of its prompts
    keep: int = 0  # the minute until which it is kept; 0: it is not
    children: dict[Key, "Node"] = field(default_factory=dict, repr=False)


class RadixTree:
    def __init__(self, page_size: int, changes: BlockChanges, most_kept: int) -> None:
        """`changes` hears of every block that comes and goes. Salts that keep pages share `most_kept` of them."""
        self.page_size = page_size
        self.most_kept = most_kept
        self.root = Node(None, b"", 0, b"", b"")
        self.changes = changes
        self._by_page: dict[int, Node] = {}
        self._by_block: dict[bytes, Node] = {}
        self._kept: Counter[bytes] = Counter()  # nodes that are kept, by salt; no salt has none
        self._idle: dict[int, dict[Node, None]] = {}  # by `keep`, none of them empty; each with the oldest first

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def match(self, tokens: Sequence[int], max_pages: int, salt: bytes) -> list[Node]:
        """Nodes of the longest cached prefix of `tokens` with this salt, at most `max_pages` of them."""
        node, path = self.root, []
        for index in range(max_pages):
            child = node.children.get(self._key(tokens, index, salt))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def find(self, blocks: Sequence[bytes]) -> list[Node]:
        """Nodes of the longest cached run of `blocks`, those of a prefix's pages."""
        path: list[Node] = []
        for block in blocks:
            node = self._by_block.get(block)
            if node is None or node.parent is not (path[-1] if path else self.root):
                break
            path.append(node)
        return path

    def extend(self, parent: Node, tokens: Sequence[int], index: int, salt: bytes, *, page: int, block: bytes) -> Node:
        """Return the child of `parent` for page `index` of `tokens`: the existing one, else a new busy one for `page`
        and `block`.
        """
        key = self._key(tokens, index, salt)
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(parent, key, page, block, salt)
            self._by_page[page] = child
            if self._by_block.setdefault(block, child) is child:
                self.changes.store(block)
        return child

    def holds(self, node: Node) -> bool:
        return self._by_page.get(node.page) is node

    def set_busy(self, page: int) -> None:
        node = self._by_page[page]
        if alike := self._idle.get(node.keep):
            alike.pop(node, None)
            if not alike:
                del self._idle[node.keep]

    def set_idle(self, page: int) -> None:
        """Make `page` the youngest idle page."""
        self.set_busy(page)
        node = self._by_page[page]
        self._idle.setdefault(node.keep, {})[node] = None

    def keep(self, path: Iterable[Node], salt: bytes, until: int) -> None:
        """Keep the nodes of a path from the root, all of them busy, until this minute at least. Ends where the salt has
        its share.
        """
        share = self.most_kept // len(self._kept.keys() | {salt})
        for node in path:
            if not node.keep:
                if self._kept[salt] >= share:
                    break
                self._kept[salt] += 1
            node.keep = max(node.keep, until)

    def expire(self, minute: int) -> None:
        """Idle nodes that are kept until `minute` or less become the youngest of those that are not kept."""
        for until in sorted(until for until in self._idle if 0 < until <= minute):
            expired = self._idle.pop(until)
            for node in expired:
                self._end_keep(node)
            self._idle.setdefault(0, {}).update(expired)

    def _end_keep(self, node: Node) -> None:
        if node.keep:
            node.keep = 0
            self._kept[node.salt] -= 1
            if not self._kept[node.salt]:
                del self._kept[node.salt]

    def evict(self) -> int:
        """Forget the first of the idle nodes and return its page."""
        node = next(iter(self._idle[min(self._idle)]))
        assert not node.children, f"page {node.page} is evicted before its {len(node.children)} children"
        assert node.parent is not None
        self.set_busy(node.page)
        self._end_keep(node)
        del self._by_page[node.page]
        del node.parent.children[node.key]
        if self._by_block.get(node.block) is node:
            del self._by_block[node.block]
            self.changes.remove(node.block)
        return node.page

    def _key(self, tokens: Sequence[int], index: int, salt: bytes) -> Key:
        start = index * self.page_size
        page = array("I", tokens[start : start + self.page_size]).tobytes()
        return page if index else (salt, page)
