"""A radix tree over page-aligned token ids: which pages hold which prefix.

The idea is SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104). The tree owns
the pages of cached prefixes until it evicts them. It knows neither requests nor the free
list, and it counts time in uses, not in seconds.

    root
     |- [7 7 7 7] pages 0 1            an edge's ids and pages belong to the node below;
     |    |- [1 1 2 2] pages 2 3       siblings differ within their first page, which is
     |    `- [1 3] page 9              therefore the key of a child
     `- salt "b" [7 7] page 4          under the root the key begins with the salt
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from services.common.prefix_hash import BLOCK_TOKENS, extend_hashes, salt_hash
from services.worker.kvcache.allocator import IntegrityError
from services.worker.kvcache.digest import PrefixDigest
from services.worker.kvcache.prefix_cache import Match, TokenArray

_MAX_DIGEST = 1024


class Node:
    """The end of a cached prefix. `lock_count` counts the locks here and below."""

    __slots__ = (
        "children",
        "end",
        "hashes",
        "in_heap",
        "key",
        "last_used",
        "lock_count",
        "pages",
        "parent",
        "token_ids",
    )

    def __init__(
        self, parent: Node | None, key: bytes, token_ids: TokenArray, pages: list[int]
    ) -> None:
        self.parent = parent
        self.key = key
        self.token_ids = token_ids
        self.pages = pages
        # How many tokens the whole prefix has.
        self.end: int = len(token_ids) + (parent.end if parent else 0)
        self.children: dict[bytes, Node] = {}
        self.hashes: list[int] = []  # of the 64-token blocks that end on this edge
        self.lock_count = 0
        self.last_used = 0
        self.in_heap = False

    @property
    def start(self) -> int:
        return self.end - len(self.token_ids)

    @property
    def evictable_now(self) -> bool:
        """An unlocked leaf that is not the root."""
        return self.lock_count == 0 and not self.children and self.parent is not None


class RadixTree:
    """The prefix cache of `--cache radix` (`services.worker.kvcache.prefix_cache`)."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = Node(None, b"", np.empty(0, np.int32), [])
        self._num_pages = 0
        self._num_locked = 0
        self._uses = 0
        # Unlocked leaves by last use. An entry may be out of date: it is looked at again
        # when it comes up, and each node has at most one, so the heap stays small.
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushes = 0
        self._digest = PrefixDigest(_MAX_DIGEST)

    @property
    def num_evictable(self) -> int:
        return self._num_pages - self._num_locked

    @property
    def num_locked(self) -> int:
        return self._num_locked

    def match(self, token_ids: TokenArray, salt: str) -> Match[Node]:
        """The longest cached prefix; splits an edge, so that a lock covers no page too many."""
        node, pages = self._root, list[int]()
        while (child := self._child(node, token_ids, salt)) is not None:
            common = self._common_tokens(child.token_ids, token_ids[node.end :])
            node = child if common == len(child.token_ids) else self._split(child, common)
            pages += node.pages
        return Match(node, pages)

    def lock(self, node: Node) -> None:
        """Locks a node and all above it, and makes them the most recently used."""
        assert node.parent is not None or node is self._root, "an evicted node cannot be locked"
        for ancestor in self._path(node):
            if ancestor.lock_count == 0:
                self._num_locked += len(ancestor.pages)
            ancestor.lock_count += 1
        self._touch(node)

    def unlock(self, node: Node) -> None:
        """Undoes one `lock`."""
        for ancestor in self._path(node):
            if ancestor.lock_count == 0:
                raise IntegrityError("a prefix was unlocked more often than locked")
            ancestor.lock_count -= 1
            if ancestor.lock_count == 0:
                self._num_locked -= len(ancestor.pages)
                self._offer(ancestor)

    def insert(self, token_ids: TokenArray, pages: Sequence[int], salt: str) -> Match[Node]:
        """Takes over the pages of what is not cached yet; answers with the pages that count."""
        found = self.match(token_ids, salt)
        node, start = found.node, found.node.end
        end = len(pages) * self._page_size
        if start == end:
            self._touch(node)
            return found
        rest = token_ids[start:end].copy()
        key = self._key(node, token_ids, salt)
        leaf = Node(node, key, rest, list(pages[start // self._page_size :]))
        node.children[key] = leaf
        self._num_pages += len(leaf.pages)
        first_block = start // BLOCK_TOKENS * BLOCK_TOKENS
        leaf.hashes = extend_hashes(self._last_hash(node, salt), token_ids[first_block:end])
        self._touch(leaf)
        self._offer(leaf)
        return Match(leaf, [*found.pages, *leaf.pages])

    def evict(self, num_pages: int) -> list[int]:
        """Gives up the pages of least recently used leaves, from their ends."""
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not node.evictable_now:
                continue  # unlocking it, or losing its last child, offers it again
            if node.last_used != last_used:
                self._offer(node)
                continue
            freed += self._trim(node, num_pages - len(freed))
        return freed

    def digest(self) -> list[int]:
        return self._digest.newest()

    def pages(self) -> list[int]:
        return [page for node in self._nodes() for page in node.pages]

    def check_integrity(self) -> None:
        """Recounts the tree. Raises IntegrityError where a counter, a key or a lock is wrong."""
        nodes = list(self._nodes())
        _require(self._num_pages == sum(len(node.pages) for node in nodes), "pages miscounted")
        locked = sum(len(node.pages) for node in nodes if node.lock_count)
        _require(self._num_locked == locked, "locked pages miscounted")
        for node in nodes:
            below = sum(child.lock_count for child in node.children.values())
            _require(node.lock_count >= below, "a locked node hangs below an unlocked one")
            _require(node.lock_count >= 0, "a lock count is negative")
            _require(len(node.token_ids) == len(node.pages) * self._page_size, "a ragged edge")
            blocks = node.end // BLOCK_TOKENS - node.start // BLOCK_TOKENS
            _require(len(node.hashes) == blocks, "blocks miscounted")
            _require(node.in_heap or not node.evictable_now, "a leaf can never be evicted")
            if node.parent is not None:
                _require(node.parent.children.get(node.key) is node, "a child under a wrong key")
                _require(node.start == node.parent.end, "an edge starts at a wrong position")
                _require(bool(node.pages), "an edge without pages")

    def _key(self, node: Node, token_ids: TokenArray, salt: str) -> bytes:
        page = token_ids[node.end : node.end + self._page_size].tobytes()
        return salt.encode("utf-8", "surrogatepass") + page if node is self._root else page

    def _child(self, node: Node, token_ids: TokenArray, salt: str) -> Node | None:
        """The child that shares at least a page with the ids after `node`."""
        if len(token_ids) - node.end < self._page_size:
            return None
        return node.children.get(self._key(node, token_ids, salt))

    def _common_tokens(self, left: TokenArray, right: TokenArray) -> int:
        """How many ids agree from the start, in whole pages."""
        length = min(len(left), len(right))
        differ = np.flatnonzero(left[:length] != right[:length])
        common = int(differ[0]) if len(differ) else length
        return common - common % self._page_size

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Cuts a node's edge; returns the new upper part.

        The lower part stays the old object: locks on it are kept by others and cover the
        upper part too, which therefore starts with the same count.
        """
        assert node.parent is not None
        num_pages = num_tokens // self._page_size
        upper = Node(node.parent, node.key, node.token_ids[:num_tokens], node.pages[:num_pages])
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        num_blocks = upper.end // BLOCK_TOKENS - upper.start // BLOCK_TOKENS
        upper.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        node.parent.children[node.key] = upper
        node.parent = upper
        node.token_ids, node.pages = node.token_ids[num_tokens:], node.pages[num_pages:]
        node.key = node.token_ids[: self._page_size].tobytes()
        upper.children[node.key] = node
        return upper

    def _trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Takes up to `num_pages` pages from a leaf's end, and the leaf away with the last."""
        assert leaf.parent is not None
        keep = max(len(leaf.pages) - num_pages, 0)
        freed, leaf.pages = leaf.pages[keep:], leaf.pages[:keep]
        self._num_pages -= len(freed)
        num_blocks = (leaf.start + keep * self._page_size) // BLOCK_TOKENS
        num_blocks -= leaf.start // BLOCK_TOKENS
        leaf.end -= len(freed) * self._page_size
        leaf.token_ids = leaf.token_ids[: keep * self._page_size]
        self._digest.discard(leaf.hashes[num_blocks:])
        del leaf.hashes[num_blocks:]
        if keep:
            self._offer(leaf)
        else:
            parent, leaf.parent = leaf.parent, None
            del parent.children[leaf.key]
            self._offer(parent)
        return freed

    def _offer(self, node: Node) -> None:
        """Enters a node for eviction if it is an unlocked leaf and not entered yet."""
        if node.evictable_now and not node.in_heap:
            node.in_heap = True
            self._num_pushes += 1
            heapq.heappush(self._heap, (node.last_used, self._num_pushes, node))

    def _touch(self, node: Node) -> None:
        self._uses += 1
        path = list(self._path(node))
        for ancestor in path:
            ancestor.last_used = self._uses
        self._digest.touch(value for ancestor in reversed(path) for value in ancestor.hashes)

    def _last_hash(self, node: Node, salt: str) -> int:
        """The hash of the last whole block at or above a node's end."""
        for ancestor in self._path(node):
            if ancestor.hashes:
                return ancestor.hashes[-1]
        return salt_hash(salt)

    def _path(self, node: Node) -> Iterator[Node]:
        """A node and its ancestors, the root excepted."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise IntegrityError(f"radix tree: {fault}")
