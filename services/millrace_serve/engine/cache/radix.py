"""Prefix cache: a tree of full pages, one node per page, keyed by the page's tokens; that of a first page by the salt
of its prompts, too. So a prompt finds pages of its own salt and tokens, whatever their blocks are. Prefix fetches,
which name pages by their block, find one node of each.

Nodes name physical pages but do not own them: engine/cache/kv_cache.py keeps the holders in the block pool, and marks
idle nodes (no sequence and no published prompt uses their page). Idle nodes are evicted in the order in which they
became idle. A user of a node uses its parents too, and leaves the deepest first; so a parent is never evicted before
its children.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_serve.engine.cache.changes import TierChanges

Key = tuple[int | bytes, ...]


class Node:
    __slots__ = ("block", "children", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: Key, page: int, block: bytes) -> None:
        self.parent = parent
        self.key = key  # the page's tokens, after the salt on a first page
        self.page = page
        self.block = block  # millrace_common/page_hash.py; of the root: empty
        self.children: dict[Key, Node] = {}


class RadixTree:
    def __init__(self, page_size: int, changes: TierChanges) -> None:
        """`changes` hears of every block that comes and goes."""
        self.page_size = page_size
        self.root = Node(None, (), 0, b"")
        self.changes = changes
        self._by_page: dict[int, Node] = {}
        self._by_block: dict[bytes, Node] = {}
        self._idle: dict[Node, None] = {}  # oldest first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

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
            child = parent.children[key] = Node(parent, key, page, block)
            self._by_page[page] = child
            if self._by_block.setdefault(block, child) is child:
                self.changes.store(block)
        return child

    def holds(self, node: Node) -> bool:
        return self._by_page.get(node.page) is node

    def set_busy(self, page: int) -> None:
        self._idle.pop(self._by_page[page], None)

    def set_idle(self, page: int) -> None:
        """Make `page` the youngest idle page."""
        node = self._by_page[page]
        self._idle.pop(node, None)
        self._idle[node] = None

    def evict(self) -> int:
        """Forget the node that has been idle longest and return its page."""
        node = next(iter(self._idle))
        assert not node.children, f"page {node.page} is evicted before its {len(node.children)} children"
        assert node.parent is not None
        del self._idle[node]
        del self._by_page[node.page]
        del node.parent.children[node.key]
        if self._by_block.get(node.block) is node:
            del self._by_block[node.block]
            self.changes.remove(node.block)
        return node.page

    def _key(self, tokens: Sequence[int], index: int, salt: bytes) -> Key:
        start = index * self.page_size
        page = tokens[start : start + self.page_size]
        return tuple(page) if index else (salt, *page)
