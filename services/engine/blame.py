"""Whose prefill stalled whom, and for how long. Knows steps' facts; nothing of requests' fate.

A step that carries prompts beside decodes is longer than its decodes alone would be. Each decoding request is charged
the step's time by shares of tokens: a prompt's tokens, of all the step's tokens. The same rule gives `stalled_ns`.
"""

from __future__ import annotations

from collections.abc import Callable

from services.engine.outputs import StepFacts

MAX_CULPRITS = 32  # told apart for one request; the rest are charged together
SHOWN = 5
REST = "others"


class Blame:
    """What each open request lost to each other."""

    def __init__(self) -> None:
        self._lost_ns: dict[int, dict[str, int]] = {}  # by who was stalled, then by the name of who did it

    def add(self, facts: StepFacts, name_of: Callable[[int], str]) -> None:
        """Charges one step; `name_of` names a request of the step."""
        if not facts.prefill_token_count or not facts.decode_token_count:
            return
        total = facts.prefill_token_count + facts.decode_token_count + facts.draft_token_count
        shares = [
            (name_of(m.request_id) or REST, facts.step_ns * m.token_count // total)
            for m in facts.members
            if not m.decoding
        ]
        for member in facts.members:
            if member.decoding:
                lost = self._lost_ns.setdefault(member.request_id, {})
                for culprit, share_ns in shares:
                    key = culprit if culprit in lost or len(lost) < MAX_CULPRITS else REST
                    lost[key] = lost.get(key, 0) + share_ns

    def take(self, request_id: int) -> list[tuple[str, int]]:
        """Who stalled a request that has ended, worst first: (name, nanoseconds). At most `SHOWN`."""
        lost = self._lost_ns.pop(request_id, {})
        return sorted(lost.items(), key=lambda item: -item[1])[:SHOWN]
