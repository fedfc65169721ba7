"""The tokens of one step, handed out. Knows counts; nothing of blocks or of who should be preempted.

Two profiles say what prompts may take while other requests decode:

    throughput     decodes first, then prompts, with all that is left: the fewest steps
    interactive    prompts first, each in small chunks and all of them within two: a prompt starts at once, and no
                   stream waits for more than that in any step
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.request import Request

PROFILES = ("interactive", "throughput")


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """Bounds of a step."""

    max_num_seqs: int = 32
    """Sequences a step, and that run; paused ones do not count, and a key that runs nothing may have one more."""
    max_num_batched_tokens: int = 512
    """Tokens a step; at least one a sequence."""
    max_chunk_tokens: int = 512
    """Tokens of one prompt a step."""
    shared_chunk_tokens: int | None = None
    """Tokens of one prompt in a step in which other requests decode, twice that of all prompts, and prompts go
    first. None: the profile is throughput."""

    @property
    def prompts_first(self) -> bool:
        """True in the interactive profile."""
        return self.shared_chunk_tokens is not None


class StepBudget:
    """What one step still has to give, and what it has given, by request id."""

    def __init__(self, policy: BudgetPolicy, decode_count: int, kept_places: int = 0) -> None:
        """Begin a step in which ``decode_count`` running requests have one token to compute.

        ``kept_places`` are of those that wait, until it is set to 0.
        """
        self.counts: dict[int, int] = {}
        self.kept_places = kept_places
        self._policy = policy
        self._left = policy.max_num_batched_tokens
        self._chunk = policy.max_chunk_tokens
        self._prompts_left = self._left
        if policy.shared_chunk_tokens is not None and decode_count:
            self._chunk = min(self._chunk, policy.shared_chunk_tokens)
            # Beside what decodes need; where a step is too small for both, prompts may have half of it.
            beside = min(2 * self._chunk, self._left - decode_count)
            self._prompts_left = max(beside, min(self._chunk, self._left // 2))

    @property
    def full(self) -> bool:
        """True when the step takes no further sequence."""
        return len(self.counts) + self.kept_places >= self._policy.max_num_seqs

    @property
    def left(self) -> int:
        """Tokens that nobody has been given."""
        return self._left

    @property
    def spent(self) -> bool:
        """True when no token is left."""
        return self._left == 0

    @property
    def spent_on_prompts(self) -> bool:
        """True when no token is left for a prompt."""
        return min(self._left, self._prompts_left) == 0

    def offer(self, request: Request) -> int:
        """How many of its pending tokens a request may have now."""
        pending = request.pending_count
        if pending == 1:
            return min(1, self._left)
        return min(pending, self._left, self._prompts_left, self._chunk)

    def give(self, request: Request, count: int) -> None:
        """Hand out ``count`` tokens, not more than were offered."""
        self.counts[request.request_id] = count
        self._left -= count
        if request.pending_count > 1:
            self._prompts_left -= count

    def take_back(self, request: Request) -> None:
        """Undo ``give``, if there was one."""
        count = self.counts.pop(request.request_id, 0)
        self._left += count
        if request.pending_count > 1:
            self._prompts_left += count
