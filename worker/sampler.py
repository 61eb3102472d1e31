"""From logits to tokens in plain torch, a row at a time as if it were alone; what the fused kernels must equal bit for bit.

Nothing here reads a value on the host unless told that it may, so a graph can record it.
"""

from __future__ import annotations

import torch

from worker.mass import FRACTION_ONE, masses, ordered_keys, share, share_up, token_keys
from worker.rng import device_fractions
from worker.sampling import MAX_LOGPROBS
from worker.sampling_needs import ALL_NEEDS, Need
from worker.sampling_views import LOG2_E, MAX_COUNT, NUM_WHOLE, WORD_BITS, Place, Real, SamplingViews, Whole

CANDIDATES = 1024
"""Tokens sorted first for top-k and top-p where the host may look; a row that needs more is sorted whole."""
NUM_DETAILS = 3 + MAX_LOGPROBS
"""Numbers a row's log-probabilities are made of: see worker.logprobs."""
LOWEST_KEY = torch.iinfo(torch.int32).min

Sampled = tuple[torch.Tensor, torch.Tensor]
"""[rows, 2] int64: the token, and 1 where the row is finite; [rows, NUM_DETAILS] int64, or no columns when not needed."""


def sample(logits: torch.Tensor, views: SamplingViews, needs: Need = ALL_NEEDS, *, is_static: bool = True) -> Sampled:
    """Choose a token for each row of `views.places` from `logits` [any, vocab] float32, and move the seats on.

    `needs` covers those of all rows. The tokens that top-k, top-p and min-p keep are those at or above a threshold, top-k
    first, top-p over what it leaves, then min-p; the draw inverts the cumulative distribution in id order. Unless
    `is_static`, the host may look at values on the way.
    """
    return _Choice(logits, views, needs, is_static=is_static).make()


class _Choice:
    """One step's rows."""

    def __init__(self, logits: torch.Tensor, views: SamplingViews, needs: Need, *, is_static: bool) -> None:
        self.views, self.needs, self.is_static = views, needs, is_static
        self.seats = views.places[:, Place.SEAT]
        self.tokens = views.places[:, Place.TOKEN]
        self.whole = views.whole[self.seats]
        self.real = views.real[self.seats]
        self.raw = logits[views.places[:, Place.LOGITS]]
        self.greedy = views.last_tokens[self.tokens]
        self.raw_best = _at(self.raw, self.greedy)

    def make(self) -> Sampled:
        logits, chosen, best = self.raw, self.greedy, self.raw_best
        if self.needs & Need.EDITS:
            logits = self._edited()
            chosen = logits.argmax(dim=-1)
            best = _at(logits, chosen)
        if self.needs & Need.RANDOM:
            chosen = torch.where(self._has(Need.RANDOM), self._drawn(logits, best), chosen)
        is_finite = self.raw_best.isfinite() & best.isfinite()
        chosen = torch.where(is_finite, chosen, self.greedy)
        self._move_on(chosen)
        packed = torch.stack([chosen, is_finite.long()], dim=-1)
        return packed, self._details(chosen) if self.needs & Need.LOGPROBS else packed[:, :0]

    def _has(self, need: Need) -> torch.Tensor:
        return (self._whole(Whole.NEEDS) & int(need)) != 0

    def _whole(self, column: Whole) -> torch.Tensor:
        return self.whole[:, column]

    def _real(self, column: Real) -> torch.Tensor:
        return self.real[:, column, None]

    def _edited(self) -> torch.Tensor:
        """Penalties first, then biases, then masks."""
        logits = self.raw
        if self.needs & Need.PENALTY:
            logits = torch.where(self._has(Need.PENALTY)[:, None], self._penalised(logits), logits)
        if self.needs & Need.BIAS:
            logits = self._biased(logits)
        if self.needs & Need.ALLOWED:
            outside = ~self._mask(self.views.allowed) & self._has(Need.ALLOWED)[:, None]
            logits = logits.masked_fill(outside, -torch.inf)
        if self.needs & Need.BANNED:
            is_early = self._has(Need.BANNED) & (self._whole(Whole.POSITION) < self._whole(Whole.MIN_TOKENS))
            logits = logits.masked_fill(self._mask(self.views.banned) & is_early[:, None], -torch.inf)
        return logits

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        counts = self.views.counts[self.seats]
        factor, times = self._real(Real.REPETITION), counts >> 1
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(counts != 0, repeated, logits)
        penalty = self._real(Real.PRESENCE) + self._real(Real.FREQUENCY) * times.to(torch.float32)
        return torch.where(times > 0, logits - penalty, logits)

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(self.views.bias.shape[1], device=logits.device)
        is_set = self._has(Need.BIAS)[:, None] & (numbers < self._whole(Whole.NUM_BIAS)[:, None])
        ids = torch.where(is_set, self.views.bias_ids[self.seats].to(torch.int64), 0)
        return logits.scatter_add(1, ids, torch.where(is_set, self.views.bias[self.seats], 0.0))

    def _mask(self, words: torch.Tensor) -> torch.Tensor:
        bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
        spread = (words[self.seats][:, :, None] >> bits) & 1
        return spread.flatten(1)[:, : self.views.vocab_size] != 0

    def _drawn(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        exponents = (logits - best[:, None]) * self._real(Real.SCALE)
        mass = masses(exponents)
        if self.needs & Need.CUT:
            keys = ordered_keys(logits)
            mass = torch.where(keys >= self._cut(keys, mass)[:, None], mass, 0)
        if self.needs & Need.MIN_P:
            mass = torch.where(exponents >= self._real(Real.MIN_P), mass, 0)
        cumulative = mass.cumsum(dim=-1)
        position = self._whole(Whole.POSITION)
        fraction = device_fractions(self._whole(Whole.SEED), self._whole(Whole.CHOICE), position)
        target = share(cumulative[:, -1], fraction)
        drawn = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
        return drawn.clamp_(max=logits.shape[-1] - 1)

    def _cut(self, keys: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """The smallest key that top-k and top-p keep: [rows]."""
        count = width = keys.shape[-1]
        if not self.is_static and width > CANDIDATES and int(self._whole(Whole.TOP_K).max()) <= CANDIDATES:
            count = CANDIDATES
        lowest, is_found = self._cut_within(keys, mass, count)
        if count < width and not bool(is_found.all()):
            lowest, _ = self._cut_within(keys, mass, width)
        return lowest

    def _cut_within(self, keys: torch.Tensor, mass: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cut, and whether the `count` largest keys were enough to find it."""
        ordered, ids = keys.topk(count, dim=-1)
        top_k, top_p = self._whole(Whole.TOP_K), self._whole(Whole.TOP_P)
        kth = ordered.gather(1, (top_k.clamp(1, count) - 1)[:, None])
        kth = kth.masked_fill(top_k[:, None] <= 0, LOWEST_KEY)
        wanted = share_up(torch.where(keys >= kth, mass, 0).sum(dim=-1), top_p)[:, None]
        reached = mass.gather(1, ids).cumsum(dim=-1)
        place = torch.searchsorted(reached, wanted)
        pth = ordered.gather(1, place.clamp(max=count - 1))
        has_top_p = top_p < FRACTION_ONE
        pth = pth.masked_fill(~has_top_p[:, None], LOWEST_KEY)
        return torch.maximum(kth, pth).squeeze(1), ~has_top_p | (place.squeeze(1) < count)

    def _move_on(self, chosen: torch.Tensor) -> None:
        """Padding rows share a place and a seat with others: they add nothing."""
        views, is_live = self.views, self._whole(Whole.NEEDS) != 0
        views.last_tokens.index_add_(0, self.tokens, torch.where(is_live, chosen - self.greedy, 0))
        views.whole.view(-1).index_add_(0, self.seats * NUM_WHOLE + int(Whole.POSITION), is_live.long())
        if self.needs & Need.PENALTY:
            cells = self.seats * views.vocab_size + chosen
            is_counted = self._has(Need.PENALTY) & (views.counts.view(-1)[cells] >> 1 < MAX_COUNT)
            views.counts.view(-1).index_add_(0, cells, 2 * is_counted.to(torch.int16))

    def _details(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of the model's own distribution, before edits and temperature."""
        total = masses((self.raw - self.raw_best[:, None]) * LOG2_E).sum(dim=-1, keepdim=True)
        keys = token_keys(self.raw)
        both = keys.gather(1, torch.stack([self.greedy, chosen], dim=-1))
        top = keys.topk(min(MAX_LOGPROBS, keys.shape[-1]), dim=-1).values
        missing = NUM_DETAILS - 3 - top.shape[-1]
        return torch.cat([total, both, torch.nn.functional.pad(top, (0, missing))], dim=-1)


def _at(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return values.gather(1, ids[:, None]).squeeze(1)
