"""What an engine keeps between requests, in one record: for those who ask its thread to look at it or change it."""

from __future__ import annotations

from typing import NamedTuple

from sparsejax.chains import Chains
from sparsejax.prune_jobs import PruneJobs
from sparsejax.radix_cache import RadixCache


class Caches(NamedTuple):
    """The caches of one engine. The engine thread's: others get at them through `Engine.consult`."""

    chains: Chains
    radix: RadixCache
    prunes: PruneJobs
