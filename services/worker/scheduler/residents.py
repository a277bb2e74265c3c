"""The requests that hold KV pages and a slot, and the rule by which they give them back.

A batch in flight reads and writes the pages of its rows, so what it uses is freed only when
it is done: a request that ends leaves later, and pages that a shared prefix has made
superfluous are kept loose until then. It knows batches only by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from services.worker.core import EngineInfo
from services.worker.kvcache.cache import KVCache
from services.worker.scheduler.request import Request, State
from services.worker.scheduler.slots import SlotTables


class Residents:
    """Running requests in order of admission, and ended ones still in a batch in flight."""

    def __init__(self, info: EngineInfo, num_slots: int, cache: Literal["radix", "none"]) -> None:
        self.kv = KVCache(info.num_pages, info.page_size, cache)
        self.slots = SlotTables(num_slots, dummy_page=info.num_pages)
        self._page_size = info.page_size
        self._running: dict[int, Request] = {}  # by handle, in order of admission
        self._leaving: list[Request] = []  # ended, with a row in a batch in flight
        self._loose_pages: list[tuple[int, list[int]]] = []  # to be freed after that step
        self._last_done = 0  # the last step whose batch is done
        self._num_gains = 0  # times that room, or a cached prefix, may have been won
        self._refusal = (0, 0)  # the sequence number last refused, and the gains by then
        self._cached = ((0, 0), 0)  # the same of the last that was looked at; its cached tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Iterable[Request]:
        """Running requests, in order of admission."""
        return self._running.values()

    def split(self) -> tuple[list[Request], list[Request]]:
        """The running requests whose next step computes one token and samples the next, and
        those with ids yet to be computed."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running.values():
            if request.num_computed < request.num_prefill:
                prefilling.append(request)
            elif request.num_sampled < request.sampling.max_tokens:
                decoding.append(request)
        return decoding, prefilling

    def admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and the pages of its known ids, cached ones first.

        Returns False, with nothing changed, if there is not enough. Beyond its own pages one
        a running request must be left, or it would be preempted as soon as those decode on.
        A request that was refused is looked at again when something was gained since: each
        look makes its prefix the newest one, at the cost of others.
        """
        attempt = (request.sequence, self._num_gains)
        if not self.slots.num_free or attempt == self._refusal:
            return False
        ids = request.prefill_ids
        # Tokens whose log-probabilities are wanted must be computed, cached or not.
        table = self.kv.open(ids, request.cache_salt, reuse=request.prompt_logprobs is None)
        missing = self.kv.pages_for(len(ids)) - len(table.pages)
        if missing + len(self._running) > self.kv.num_available:
            self.kv.close(table)
            self._refusal = attempt
            return False
        extended = self.kv.extend(table, len(ids))
        assert extended
        request.state = State.RUNNING
        request.table = table
        request.num_pages = len(table.pages)
        request.slot = self.slots.acquire(table.pages)
        request.num_computed = table.num_shared * self._page_size
        self._running[request.handle] = request
        return True

    def num_fitting(self, request: Request) -> tuple[int, int]:
        """How many requests like a waiting one there are slots and pages for, about; and how many
        of its ids are cached."""
        ids, cached = request.prefill_ids, 0
        if request.prompt_logprobs is None:
            attempt = (request.sequence, self._num_gains)
            if attempt != self._cached[0]:
                self._cached = attempt, self.kv.cached_tokens(ids, request.cache_salt)
            cached = self._cached[1]
        # Cached pages are taken once; each request must be left one page more, as in `admit`.
        shared = cached // self._page_size
        left = self.kv.num_available - shared - len(self._running) + 1
        each = self.kv.pages_for(len(ids)) - shared + 1
        return max(min(self.slots.num_free, left // each), 0), cached

    def without_room(self, requests: Iterable[Request]) -> list[Request]:
        """Those whose pages do not hold the token after those computed."""
        size = self._page_size
        return [r for r in requests if r.num_computed >= r.num_pages * size]

    def extend(self, request: Request) -> bool:
        """Makes room for the token after those computed; False if the pool has none."""
        table = request.table
        assert table is not None
        if not self.kv.extend(table, request.num_computed + 1):
            return False
        request.num_pages = len(table.pages)
        self.slots.write(request.slot, request.num_pages - 1, table.pages[-1:])
        return True

    def victim(self) -> Request:
        """Whom to preempt: the lowest priority, then the youngest."""
        return min(self._running.values(), key=lambda r: (r.priority, -r.sequence))

    def preempt(self, request: Request) -> None:
        """Takes a running request's pages and slot. No batch in flight may use them."""
        assert request.last_step <= self._last_done
        del self._running[request.handle]
        self._release(request)
        request.requeue()

    def store_prefix(self, request: Request, num_tokens: int) -> None:
        """Caches the first tokens of a running request, which a done batch has computed."""
        table = request.table
        assert table is not None
        loose = self.kv.store(table, request.prefill_ids[:num_tokens])
        self._num_gains += 1
        if loose:
            self.slots.write(request.slot, 0, table.pages[: table.num_shared])
            if request.last_step <= self._last_done:
                self.kv.free(loose)
            else:
                self._loose_pages.append((request.last_step, loose))

    def leave(self, request: Request) -> None:
        """Lets an ended request go: now, or when its last batch is done."""
        del self._running[request.handle]
        self._num_gains += 1
        request.state = State.ENDED
        if request.last_step <= self._last_done:
            self._release(request)
        else:
            self._leaving.append(request)

    def step_done(self, number: int) -> None:
        """Frees what only batches up to this one have used."""
        self._last_done = number
        for request in [r for r in self._leaving if r.last_step <= number]:
            self._leaving.remove(request)
            self._release(request)
        for last_step, pages in [entry for entry in self._loose_pages if entry[0] <= number]:
            self._loose_pages.remove((last_step, pages))
            self._num_gains += 1
            self.kv.free(pages)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is in exactly one place."""
        holders = [*self._running.values(), *self._leaving]
        tables = [request.table for request in holders if request.table is not None]
        self.kv.check_integrity(tables, [p for _, pages in self._loose_pages for p in pages])

    def _release(self, request: Request) -> None:
        """Caches what a request has computed and frees its pages and slot."""
        table = request.table
        assert table is not None
        self._num_gains += 1
        # The id of a dropped token is not known, so what was computed from it is not cached.
        loose = self.kv.store(table, request.token_ids[: request.num_computed])
        self.kv.free(loose)
        self.kv.free(self.kv.close(table))
        self.slots.release(request.slot)
        request.table = None
        request.num_pages = 0
