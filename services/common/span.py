"""A span as this process records it. Knows OpenTelemetry's interface; nothing of the SDK or of exporting.

Every span has ids, whether or not its trace is sampled, so that context always travels. A span is *kept* if it records
what it is told. What happens at its end is decided by `telemetry`: sampled spans are exported at once; the others are
held by the topmost span of this process (the local root) until that one ends, and are exported then if anything failed
or was slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace import Span as SpanInterface

MAX_HELD = 64  # spans that a local root holds; what comes later is forgotten
MAX_LINKS = 128


class Span(SpanInterface):
    """Made by `Telemetry.start`, ended by whoever asked for it, exactly once.

    Attributes:
        name, kind, context, parent: as in OpenTelemetry; `parent` is None at the root of a trace.
        start_ns, end_ns: epoch nanoseconds; end_ns is 0 until it has ended.
        attributes, links: what it was told; empty where it is not kept.
        status: unset, or an error with its reason.
        request_id: the request that it belongs to; spans under it in this process inherit it.
        local_root: the topmost span of this process above it; itself where there is none.
        held: of an unsampled local root: spans below it that have ended.
        failed: whether it, or a span below it in this process, ended with an error.
        late: why it was exported although it was not sampled; "" if it was not.
    """

    __slots__ = (
        "_close",
        "attributes",
        "context",
        "end_ns",
        "failed",
        "held",
        "kept",
        "kind",
        "late",
        "links",
        "local_root",
        "name",
        "parent",
        "request_id",
        "start_ns",
        "status",
    )

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        local_root: Span | None,
        *,
        kind: SpanKind,
        start_ns: int,
        kept: bool,
        close: Callable[[Span], None],
    ) -> None:
        self.name, self.context, self.parent, self.kind = name, context, parent, kind
        self.start_ns, self.end_ns = start_ns, 0
        self.kept = kept
        self.attributes: dict[str, Any] = {}
        self.links: list[Link] = []
        self.status = Status(StatusCode.UNSET)
        self.local_root: Span = local_root if local_root is not None else self
        self.request_id: str = local_root.request_id if local_root is not None else ""
        self.held: list[Span] = []
        self.failed = False
        self.late = ""
        self._close = close

    @property
    def sampled(self) -> bool:
        """Whether the trace is sampled."""
        return bool(self.context.trace_flags.sampled)

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return self.context

    def is_recording(self) -> bool:
        """Whether it keeps what it is told: build attributes only then."""
        return self.kept and not self.end_ns

    def set_attribute(self, key: str, value: Any) -> None:
        """Sets one attribute."""
        if self.kept:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Sets several attributes."""
        if self.kept:
            self.attributes.update(attributes)

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        """Links another span; at most `MAX_LINKS`."""
        if self.kept and len(self.links) < MAX_LINKS:
            self.links.append(Link(context, attributes))

    def add_links(self, links: Sequence[Link]) -> None:
        """Links other spans; at most `MAX_LINKS` in all."""
        if self.kept:
            self.links += links[: MAX_LINKS - len(self.links)]

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Sets the status; an error cannot be taken back."""
        given = status if isinstance(status, Status) else Status(status, description)
        if self.status.status_code is not StatusCode.ERROR:
            self.status = given

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """There are no events here: what is worth knowing is an attribute or a span."""

    def update_name(self, name: str) -> None:
        """Changes the name."""
        self.name = name

    def record_exception(
        self, exception: BaseException, attributes: Any = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        """Exceptions may hold what callers sent: their reason is in the status, the rest in the log."""

    def end(self, end_time: int | None = None) -> None:
        """Ends it; a second time does nothing."""
        if not self.end_ns:
            self.end_ns = max(self.start_ns, end_time if end_time is not None else time.time_ns())
            self._close(self)
