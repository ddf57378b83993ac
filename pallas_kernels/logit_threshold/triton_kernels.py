"""Triton kernels of logit thresholds: bins, then an exact search among the few tokens that the bins leave open.

Imports triton: import this module where the kernels are launched. `below` is how far a token is under the best one of
its row, in units of temperature, so exp(-below) is its share of the best. Probability mass is summed in integers
(`MASS_BITS` after the point): no sum depends on an order, so none depends on the batch or on who comes first.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(256)
MASS_BITS = tl.constexpr(43)  # 2^20 tokens as good as the best stay below 2^63
UNIT = tl.constexpr(2.0**43)
FARTHEST = tl.constexpr(45.0)  # what is farther below has no mass: 2^20 exp(-45) < 2^-43
SLACK = tl.constexpr(1e-3)  # of the mass of a bin, for exp and for the edges of bins
FEW = tl.constexpr(256)  # candidates of a program that take their places one by one: quicker than a prefix sum
NEVER = tl.constexpr(2**31 - 1)  # key of what is not a candidate
LEAST_TEMPERATURE = tl.constexpr(1e-6)
ROUNDS_BY_VALUE = tl.constexpr(12)  # by then mostly done: evenly spread candidates are left in few rounds
FIELD = tl.constexpr(20)  # bits of a count
FIELD_MASK = tl.constexpr(2**20 - 1)


@triton.jit
def load_row(temperature, top_k, top_p, min_p, row, VOCAB: tl.constexpr):
    """A row's parameters, top_k as 0 where it cuts nothing, and whether it asks for anything."""
    degree = tl.load(temperature + row)
    k, p, least_share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where((k > 0) & (k < VOCAB), k, 0)
    asks = (degree > 0) & ((k > 0) | (p < 1.0) | (least_share > 0))
    return tl.maximum(degree, LEAST_TEMPERATURE), k, p, least_share, asks


@triton.jit
def distance(logit, peak, degree):
    """`below` of logits; infinite for -inf. NaN stays NaN, and no comparison takes it."""
    return tl.abs(tl.math.div_rn(peak - logit, degree))


@triton.jit
def share_of_best(below):
    """Probability over that of the best."""
    return tl.exp(-below)


@triton.jit
def passes(share, below, least_share):
    """min-p; the best always passes."""
    return (share >= least_share) | (below == 0.0)


@triton.jit
def in_units(share):
    """int64 mass, rounded down."""
    return (share * UNIT).to(tl.int64)


@triton.jit
def load_peak(peaks, row, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """The best logit of a row."""
    split = tl.arange(0, SPLITS_PAD)
    return tl.max(tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf")), 0)


@triton.jit
def bins_per_unit(
    peak, lows, row, degree, k, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, FULL_SPLITS: tl.constexpr
):
    """Bins per unit of `below`. The bins reach down to the highest of the splits' lows: some lows may be far outliers.

    Without top-k nothing that is FARTHEST below is of interest. Any width gives the same result, more or less quickly.
    """
    split = tl.arange(0, SPLITS_PAD)
    low = tl.max(tl.load(lows + row * SPLITS + split, mask=split < FULL_SPLITS, other=float("-inf")), 0)
    reach = distance(low, peak, degree)
    reach = tl.where(k > 0, reach, tl.minimum(reach, FARTHEST))
    return (BINS - 1) / tl.maximum(reach, 1e-30)


@triton.jit
def bin_of(below, per_unit):
    """The last bin holds all that is farther."""
    return tl.minimum(below * per_unit, BINS - 1.0).to(tl.int32)


@triton.jit
def limits_kernel(
    logits, temperature, top_k, top_p, min_p, peaks, lows, counts, cursor,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest and least finite logit of each split; counts and cursor start at 0. Grid (SPLITS, batch).

    logits float32 [batch, VOCAB]; temperature, top_p, min_p float32 and top_k int32 [batch]; peaks, lows float32
    [batch, SPLITS]; counts int32 [batch, BINS]; cursor int32 [batch]. Rows that ask for nothing are not written.
    """
    split, row = tl.program_id(0), tl.program_id(1)
    _, _, _, _, asks = load_row(temperature, top_k, top_p, min_p, row, VOCAB)
    if asks:
        token = split * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        finite = logit > float("-inf")
        low = tl.min(tl.where(finite, logit, float("inf")), 0)
        tl.store(peaks + row * SPLITS + split, tl.max(tl.where(finite, logit, float("-inf")), 0))
        tl.store(lows + row * SPLITS + split, tl.where(low < float("inf"), low, float("-inf")))
        if split == 0:
            tl.store(counts + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            tl.store(cursor + row, 0)


@triton.jit
def bins_kernel(
    logits, temperature, top_k, top_p, min_p, peaks, lows, counts, new_counts, masses, scale,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, FULL_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the tokens of each bin, and the mass of each split that min-p leaves. Grid (SPLITS, batch).

    `new_counts` are `counts`; masses int64 (as pairs of int32) [batch, SPLITS], written where top-p comes without
    top-k; scale float32 [batch, 2]: the best logit, and bins per unit; others as in `limits_kernel`.
    """
    split, row = tl.program_id(0), tl.program_id(1)
    degree, k, p, least_share, asks = load_row(temperature, top_k, top_p, min_p, row, VOCAB)
    if asks:
        peak = load_peak(peaks, row, SPLITS, SPLITS_PAD)
        per_unit = bins_per_unit(peak, lows, row, degree, k, SPLITS, SPLITS_PAD, FULL_SPLITS)
        if split == 0:
            tl.store(scale + row * 2, peak)
            tl.store(scale + row * 2 + 1, per_unit)
        token = split * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        below = distance(logit, peak, degree)
        real = below < float("inf")
        number = tl.histogram(tl.where(real, bin_of(below, per_unit), 0), BINS, mask=real)
        tl.atomic_add(new_counts + row * BINS + tl.arange(0, BINS), number, mask=number > 0, sem="relaxed")
        if (p < 1.0) & (k == 0):
            share = share_of_best(below)
            mass = tl.sum(tl.where(real & passes(share, below, least_share), in_units(share), 0), 0)
            tl.store(masses.to(tl.pointer_type(tl.int64), bitcast=True) + row * SPLITS + split, mass)


@triton.jit
def load_mass(masses, row, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Int64 sum over a row's splits."""
    split = tl.arange(0, SPLITS_PAD)
    masses = masses.to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.sum(tl.load(masses + row * SPLITS + split, mask=split < SPLITS, other=0), 0)


@triton.jit
def open_bins(number, per_unit, k, p, least_share, total):
    """First and last bin in which the worst token that stays can be; all better bins stay, all worse ones are cut.

    With top-k the first is bin 0: the mass that top-p takes its share of is only known when top-k is done.
    """
    index = tl.arange(0, BINS)
    # Bounds of the mass of each token of a bin.
    high = share_of_best(index / per_unit) * (1.0 + SLACK)
    low = tl.where(index == BINS - 1, 0.0, share_of_best((index + 1) / per_unit) * (1.0 - SLACK))
    certain = low >= least_share
    first = tl.max(tl.where(certain & (number > 0), index, 0), 0)
    last = tl.max(tl.where((high >= least_share) & (number > 0), index, 0), 0)
    if k > 0:
        enough = tl.cumsum(number, 0) >= k
        last = tl.minimum(last, tl.min(tl.where(enough, index, BINS - 1), 0))
        first = first * 0
    elif p < 1.0:
        # What top-p cuts is the tail that has no more than this mass.
        tail = (1.0 - p) * (total.to(tl.float64) / UNIT).to(tl.float32)
        weight = number.to(tl.float32)
        most = tl.cumsum(weight * high, 0, reverse=True)
        least = tl.cumsum(tl.where(certain, weight * tl.maximum(low - 2.0 / UNIT, 0.0), 0.0), 0, reverse=True)
        # Bins from `index` on are certainly cut where even their largest mass is small enough.
        last = tl.minimum(last, tl.max(tl.where(most <= tail * (1.0 - SLACK), 0, index), 0))
        first = tl.minimum(first, tl.max(tl.where(least > tail * (1.0 + SLACK), index, 0), 0))
    return first, last


@triton.jit
def choose_kernel(
    temperature, top_k, top_p, min_p, scale, counts, masses, ends,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """What the programs of a row need to know. Grid (batch,).

    ends int32 [batch, 2]: first and last open bin. Others as in `bins_kernel`.
    """
    row = tl.program_id(0)
    _, k, p, least_share, asks = load_row(temperature, top_k, top_p, min_p, row, VOCAB)
    if asks:
        per_unit = tl.load(scale + row * 2 + 1)
        number = tl.load(counts + row * BINS + tl.arange(0, BINS))
        total = row.to(tl.int64) * 0
        if (p < 1.0) & (k == 0):
            total = load_mass(masses, row, SPLITS, SPLITS_PAD)
        first, last = open_bins(number, per_unit, k, p, least_share, total)
        tl.store(ends + row * 2, first)
        tl.store(ends + row * 2 + 1, last)


@triton.jit
def collect_kernel(
    logits, temperature, top_k, top_p, min_p, scale, ends, cursor, new_cursor, better_masses, candidates,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gathers the logits in open bins, in any order, and sums the mass in better ones. Grid (SPLITS, batch).

    `new_cursor` is `cursor`: candidates so far. candidates float32 [batch, VOCAB]; better_masses as masses, written
    where top-p comes without top-k; others as in `choose_kernel`.
    """
    split, row = tl.program_id(0), tl.program_id(1)
    degree, k, p, least_share, asks = load_row(temperature, top_k, top_p, min_p, row, VOCAB)
    if asks:
        peak, per_unit = tl.load(scale + row * 2), tl.load(scale + row * 2 + 1)
        first, last = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
        row_start = row.to(tl.int64) * VOCAB
        token = split * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + row_start + token, mask=token < VOCAB, other=float("-inf"))
        below = distance(logit, peak, degree)
        real = below < float("inf")
        place = tl.where(real, bin_of(below, per_unit), BINS)
        chosen = ((place >= first) & (place <= last)).to(tl.int32)
        found = tl.sum(chosen, 0)
        if found > 0:
            candidates += row_start
            if found <= FEW:
                one = tl.full([BLOCK], 1, tl.int32)
                place_in_row = tl.atomic_add(
                    new_cursor + row + tl.zeros([BLOCK], tl.int32), one, mask=chosen > 0, sem="relaxed"
                )
            else:
                base = tl.atomic_add(new_cursor + row, found, sem="relaxed")
                place_in_row = base + tl.cumsum(chosen, 0) - 1
            tl.store(candidates + place_in_row, logit, mask=chosen > 0)
        if (p < 1.0) & (k == 0):
            mass = row.to(tl.int64) * 0
            if first > 0:
                share = share_of_best(below)
                better = (place < first) & passes(share, below, least_share)
                mass = tl.sum(tl.where(better, in_units(share), 0), 0)
            tl.store(better_masses.to(tl.pointer_type(tl.int64), bitcast=True) + row * SPLITS + split, mass)


@triton.jit
def load_keys(candidates, at, found, peak, degree, least_share):
    """Logits, `below`, and int32 keys in its order; NEVER where there is none or min-p cuts it."""
    valid = at < found
    logit = tl.load(candidates + at, mask=valid, other=float("-inf"))
    below = distance(logit, peak, degree)
    stays = valid & passes(share_of_best(below), below, least_share)
    return logit, below, tl.where(stays, below.to(tl.int32, bitcast=True), NEVER)


@triton.jit
def up_to(keys, first, second, third):
    """Int64 per key: 1 in each of three fields whose limit it does not pass; sums hold three counts."""
    one = (keys <= first).to(tl.int64)
    two = (keys <= second).to(tl.int64) << FIELD
    return one + two + ((keys <= third).to(tl.int64) << 2 * FIELD)


@triton.jit
def limit_between(low, high, part: tl.constexpr, rounds):
    """A key between two, exclusive: at a part of the way in `below`, later, if that takes long, in keys."""
    start = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    stop = high.to(tl.float32, bitcast=True)
    by_value = (start + (stop - start) * part).to(tl.int32, bitcast=True)
    by_key = low + ((high - low).to(tl.float32) * part).to(tl.int32)
    limit = tl.where(rounds < ROUNDS_BY_VALUE, by_value, by_key)
    return tl.minimum(tl.maximum(limit, low + 1), high - 1)


@triton.jit
def ends_between(keys, low, high, least, largest):
    """`least` and `largest` with those keys that are in (low, high]."""
    inside = (keys > low) & (keys <= high)
    return tl.minimum(least, tl.where(inside, keys, NEVER)), tl.maximum(largest, tl.where(inside, keys, -1))


@triton.jit
def pick(enough1, enough2, enough3, first, second, third, otherwise):
    """The value of the first that is enough."""
    return tl.where(enough1, first, tl.where(enough2, second, tl.where(enough3, third, otherwise)))


@triton.jit
def search_kernel(
    temperature, top_k, top_p, min_p, scale, masses, cursor, better_masses, candidates, threshold,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold of a row, float32 [batch], from its candidates. Grid (batch,). Arrays as in `collect_kernel`.

    Both searches divide the interval that holds the threshold by four until it holds one token, or equal
    ones.
    """
    row = tl.program_id(0)
    degree, k, p, least_share, asks = load_row(temperature, top_k, top_p, min_p, row, VOCAB)
    if not asks:
        tl.store(threshold + row, float("-inf"))
        return
    peak = tl.load(scale + row * 2)
    found = tl.load(cursor + row)
    candidates += row.to(tl.int64) * VOCAB
    lane = tl.arange(0, BLOCK)

    least = tl.full([BLOCK], NEVER, tl.int32)
    largest = tl.full([BLOCK], -1, tl.int32)
    stays = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, found, BLOCK):
        logit, below, keys = load_keys(candidates, start + lane, found, peak, degree, least_share)
        least = tl.minimum(least, keys)
        largest = tl.maximum(largest, tl.where(keys == NEVER, -1, keys))
        stays += (keys != NEVER).to(tl.int32)
    # Always: no key is at or below bottom, `num_high` keys are at or below high.
    bottom = tl.min(least, 0) - 1
    high = tl.max(largest, 0)
    num_high = tl.sum(stays, 0)

    low = bottom
    rounds = row * 0
    several = row >= 0
    while (k > 0) & (num_high > k) & (high - low > 1) & several:
        t1 = limit_between(low, high, 0.25, rounds)
        t2 = limit_between(low, high, 0.5, rounds)
        t3 = limit_between(low, high, 0.75, rounds)
        each = tl.zeros([BLOCK], tl.int64)
        least = tl.full([BLOCK], NEVER, tl.int32)
        largest = tl.full([BLOCK], -1, tl.int32)
        for start in tl.range(0, found, BLOCK):
            logit, below, keys = load_keys(candidates, start + lane, found, peak, degree, least_share)
            each += up_to(keys, t1, t2, t3)
            least, largest = ends_between(keys, low, high, least, largest)
        several = tl.min(least, 0) < tl.max(largest, 0)
        sums = tl.sum(each, 0)
        n1 = (sums & FIELD_MASK).to(tl.int32)
        n2 = ((sums >> FIELD) & FIELD_MASK).to(tl.int32)
        n3 = (sums >> 2 * FIELD).to(tl.int32)
        enough1, enough2, enough3 = n1 >= k, n2 >= k, n3 >= k
        high = pick(enough1, enough2, enough3, t1, t2, t3, high)
        num_high = pick(enough1, enough2, enough3, n1, n2, n3, num_high)
        low = pick(enough1, enough2, enough3, low, t1, t2, t3)
        rounds += 1

    if p < 1.0:
        if k > 0:
            base = row.to(tl.int64) * 0
            each = tl.zeros([BLOCK], tl.int64)
            for start in tl.range(0, found, BLOCK):
                logit, below, keys = load_keys(candidates, start + lane, found, peak, degree, least_share)
                each += tl.where(keys <= high, in_units(share_of_best(below)), 0)
            total = tl.sum(each, 0)
        else:
            base = load_mass(better_masses, row, SPLITS, SPLITS_PAD)
            total = load_mass(masses, row, SPLITS, SPLITS_PAD)
        wanted = (p.to(tl.float64) * total.to(tl.float64)).to(tl.int64) - base
        low = bottom
        num_low = row * 0
        rounds = row * 0
        several = row >= 0
        while (num_high - num_low > 1) & (high - low > 1) & several:
            t1 = limit_between(low, high, 0.25, rounds)
            t2 = limit_between(low, high, 0.5, rounds)
            t3 = limit_between(low, high, 0.75, rounds)
            each = tl.zeros([BLOCK], tl.int64)
            each1, each2, each3 = each, each, each
            least = tl.full([BLOCK], NEVER, tl.int32)
            largest = tl.full([BLOCK], -1, tl.int32)
            for start in tl.range(0, found, BLOCK):
                logit, below, keys = load_keys(candidates, start + lane, found, peak, degree, least_share)
                mass = in_units(share_of_best(below))
                each += up_to(keys, t1, t2, t3)
                each1 += tl.where(keys <= t1, mass, 0)
                each2 += tl.where(keys <= t2, mass, 0)
                each3 += tl.where(keys <= t3, mass, 0)
                least, largest = ends_between(keys, low, high, least, largest)
            several = tl.min(least, 0) < tl.max(largest, 0)
            sums = tl.sum(each, 0)
            n1 = (sums & FIELD_MASK).to(tl.int32)
            n2 = ((sums >> FIELD) & FIELD_MASK).to(tl.int32)
            n3 = (sums >> 2 * FIELD).to(tl.int32)
            # A limit with no token up to it is never enough, whatever the rounding of `wanted`.
            enough1 = (tl.sum(each1, 0) >= wanted) & (n1 > 0)
            enough2 = (tl.sum(each2, 0) >= wanted) & (n2 > 0)
            enough3 = (tl.sum(each3, 0) >= wanted) & (n3 > 0)
            high = pick(enough1, enough2, enough3, t1, t2, t3, high)
            num_high = pick(enough1, enough2, enough3, n1, n2, n3, num_high)
            low = pick(enough1, enough2, enough3, low, t1, t2, t3)
            num_low = pick(enough1, enough2, enough3, num_low, n1, n2, n3)
            rounds += 1

    worst = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, found, BLOCK):
        logit, below, keys = load_keys(candidates, start + lane, found, peak, degree, least_share)
        worst = tl.minimum(worst, tl.where(keys <= high, logit, float("inf")))
    result = tl.min(worst, 0)
    tl.store(threshold + row, tl.where(result < float("inf"), result, float("-inf")))
