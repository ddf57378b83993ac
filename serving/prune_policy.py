"""`prune_policy`: results of tools that are some turns old are cut short, without the client doing anything.

After a turn has ended, one prune job is queued for what it has to do with the conversation's chain and with the path
that others may find. The answer does not wait for it. A turn that comes before the job is done runs on what is there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparsejax.errors import EngineDeadError, PruneError, RequestError
from sparsejax.prune_records import POLICIES, PrunePart, PruneRequest
from sparsejax.request import ChainOptions, PrefixOptions
from sparsejax.serving import prompts
from sparsejax.serving.history import Conversation
from sparsejax.serving.message_spans import Span, aligned, spans
from sparsejax.serving.protocol import ChatBody
from sparsejax.serving.state import Served, ServerState
from sparsejax.serving.tool_results import Result

if TYPE_CHECKING:
    from sparsejax.cache.radix_tree import Cut as PrunedRange
    from sparsejax.caches import Caches

T = TypeVar("T")

log = logging.getLogger("sparsejax.serving")

DROP = POLICIES[0]
RESULT_ROLES = frozenset({"tool", "function"})


@dataclasses.dataclass(frozen=True)
class PrunePolicy:
    """What is to become of results of tools.

    Attributes:
      keep_last: so many of the newest stay whole.
      keep: share of an older one's tokens that stays, rounded up to whole blocks.
      policy: which of them, one of `prune_records.POLICIES`.
    """

    keep_last: int = 2
    keep: float = 0.0
    policy: str = DROP


def prune_policy(body: ChatBody, served: Served) -> PrunePolicy | None:
    """The request's policy, checked; None if it has none.

    Raises RequestError naming the field and what is allowed.
    """
    sent = body.prune_policy
    if sent is None:
        return None
    if not served.prefix_cache and not served.chain_cache:
        raise RequestError("prune_policy: this server keeps nothing between requests", param="prune_policy")
    if body.prompt_token_ids is not None or body.chain_append:
        raise RequestError(
            "prune_policy needs the whole conversation as messages (to append, use chain_append_start)",
            param="prune_policy",
        )
    last = 2 if sent.keep_last_tool_results is None else sent.keep_last_tool_results
    if not 0 <= last <= prompts.MAX_MESSAGES:
        where = "prune_policy.keep_last_tool_results"
        raise RequestError(f"{where} must be in [0, {prompts.MAX_MESSAGES}], got {last}", param=where)
    keep = 0.0 if sent.older is None or sent.older.keep is None else sent.older.keep
    if not 0 <= keep < 1:
        where = "prune_policy.older.keep"
        raise RequestError(f"{where} must be at least 0 and less than 1, got {keep:g}", param=where)
    policy = sent.older.policy if sent.older is not None else None
    if policy is None:
        policy = POLICIES[-1] if keep else DROP
    where = "prune_policy.older.policy"
    if policy not in POLICIES:
        raise RequestError(f"{where} must be one of {', '.join(POLICIES)}, got {policy[:40]!r}", param=where)
    if policy == DROP and keep:
        raise RequestError(f"{where}: {DROP} keeps nothing; leave keep out or choose another one", param=where)
    return PrunePolicy(last, keep, policy if keep else DROP)


@dataclasses.dataclass(frozen=True)
class Cut:
    """One result that is to be cut: its whole blocks [start, stop), and tokens of them that stay."""

    key: bytes
    start: int
    stop: int
    keep: int


@dataclasses.dataclass(frozen=True)
class PolicyTurn:
    """A turn that has ended, and what its policy needs.

    Attributes:
      state, served: of the server.
      policy: what to do.
      conversation: makes the request's.
      ids: of the request.
      method: that ran it.
      prefix: whose rows they are.
      chain_id: of its chain, or None.
      appended: `ids` are only what was appended to the chain.
    """

    state: ServerState
    served: Served
    policy: PrunePolicy
    conversation: Callable[[], Conversation]
    ids: Sequence[int]
    method: str
    prefix: PrefixOptions
    chain_id: str | None = None
    appended: bool = False

    def start(self) -> None:
        """Does what is to be done, in the background. For the event loop."""
        task = asyncio.get_running_loop().create_task(self._run())
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    async def _run(self) -> None:
        try:
            await self.run()
        except EngineDeadError:
            pass  # it says so itself
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if self.state.tool_results.is_new_problem(what):
                log.warning("prune_policy: a conversation stays as it is: %s", what)

    async def run(self) -> str | None:
        """Queues one job for all results that are to be cut. Returns its id, None if there is nothing to do."""
        ids, block_tokens = await self._consult(self._known)
        cuts = await prompts.in_pool(self.state, lambda: self._cuts(ids, block_tokens))
        return await self._consult(lambda caches: self._submit(caches, cuts, ids)) if cuts else None

    async def _consult(self, function: Callable[[Caches], T]) -> T:
        return await asyncio.wrap_future(self.served.engine.consult(function))

    def _known(self, caches: Caches) -> tuple[np.ndarray, int]:
        """On the engine's thread: the conversation's ids, and tokens of a block."""
        reason = caches.radix.hindrance(self.method)
        if reason is not None and self.chain_id is None:
            raise PruneError(reason)
        ids = np.asarray(self.ids, np.uint32)
        if self.appended:
            chain = caches.chains.index.chains.get(self.chain_id or "")
            if chain is None or chain.tenant != self.prefix.tenant:
                raise PruneError("the chain is gone")
            ids = chain.ledger
        return ids, caches.radix.index.block_tokens

    def _cuts(self, ids: np.ndarray, block_tokens: int) -> list[Cut]:
        """What is to be cut, done already or not. Takes time where a result is new."""
        conversation, results = self.conversation(), self.state.tool_results
        old = old_results(conversation.messages, self.policy.keep_last)
        options = ChainOptions(salt=self.prefix.salt, tenant=self.prefix.tenant)
        steps = conversation.steps(self.method, options).steps if old else []
        keys = {index: steps[index].digest for index in old}
        found = {index: result for index in old if (result := results.get(keys[index])) is not None}
        digests = _digests(ids, [result.span for result in found.values()])
        known = {index: result for index, result in found.items() if result.digest == digests[result.span]}
        new = [index for index in old if index not in known]
        looked = spans(self.served.tokenizer, conversation, ids, new) if new else {}
        digests = _digests(ids, looked.values())
        for index, span in looked.items():
            known[index] = Result(span, digests[span])
            results.put(keys[index], known[index])
        cuts = []
        for index in old:
            whole = aligned(known[index].span, block_tokens)
            if whole is not None:
                width = whole[1] - whole[0]
                keep = math.ceil(width * self.policy.keep / block_tokens) * block_tokens
                cuts.append(Cut(keys[index], *whole, keep))
        return cuts

    def _submit(self, caches: Caches, cuts: Sequence[Cut], ids: np.ndarray) -> str | None:
        """On the engine's thread: one job for what has more rows than it should."""
        chain = caches.chains.index.chains.get(self.chain_id or "")
        scope = caches.chains.scope(self.method, self.prefix.salt, self.prefix.tenant)
        index = caches.radix.index
        match = index.match(scope, ids[: cuts[-1].stop], whole=True)
        held = [(len(match.blocks) * index.block_tokens, match.lost)]
        held += [] if chain is None else [(chain.processed, chain.cuts)]
        cuts = [cut for cut in cuts if not self._under_way(caches, cut) and _rows(cut, held) > cut.keep]
        if not cuts:
            return None
        request = PruneRequest(
            method=self.method,
            ids=ids[: cuts[-1].stop],
            parts=tuple(PrunePart(((cut.start, cut.stop),), cut.keep) for cut in cuts),
            policy=self.policy.policy,
            salt=self.prefix.salt,
            tenant=self.prefix.tenant,
            chain_id=None if chain is None else self.chain_id,
        )
        prune_id = caches.prunes.submit(request).prune_id
        results = self.state.tool_results
        for cut in cuts:
            result = results.get(cut.key)
            if result is not None:
                results.put(cut.key, result._replace(prune_id=prune_id))
        return prune_id

    def _under_way(self, caches: Caches, cut: Cut) -> bool:
        result = self.state.tool_results.get(cut.key)
        if result is None or result.prune_id is None:
            return False
        try:
            return not caches.prunes.get(result.prune_id, self.prefix.tenant).ended
        except RequestError:  # forgotten
            return False


def old_results(messages: Sequence[Mapping[str, Any]], keep_last: int) -> list[int]:
    """Indexes of the results of tools, in order, without the last `keep_last`."""
    found = [i for i, message in enumerate(messages) if message["role"] in RESULT_ROLES]
    return found[: max(0, len(found) - keep_last)]


def _rows(cut: Cut, held: Iterable[tuple[int, Sequence[PrunedRange]]]) -> int:
    """Most rows that a range has, 0 where it can't be cut by itself.

    Args:
      held: tokens that are there, and ranges of them that were pruned, of the path and of the chain.
    """
    found = 0
    for tokens, pruned in held:
        inside = [old for old in pruned if old.start < cut.stop and cut.start < old.stop]
        if any(old.start < cut.start or cut.stop < old.stop for old in inside):
            return 0
        if cut.stop <= tokens:
            found = max(found, cut.stop - cut.start - sum(old.missing for old in inside))
    return found


def _digests(ids: np.ndarray, spans: Iterable[Span | None]) -> dict[Span | None, bytes]:
    """Of all ids up to the end of each span."""
    found: dict[Span | None, bytes] = {None: b""}
    hasher, done = hashlib.blake2b(digest_size=16), 0
    for span in sorted({span for span in spans if span is not None}, key=lambda span: span[1]):
        hasher.update(np.ascontiguousarray(ids[done : span[1]], "<u4").tobytes())
        done = span[1]
        found[span] = hasher.digest()
    return found
