"""One table of channel options for both sides of every hop. Knows no service.

Keepalive: a client pings an idle connection every 30 s, the server accepts a ping every 10 s, so a stream
that is silent for minutes survives, and a peer that is gone is noticed within 40 s.
Sizes: the gateway refuses a request over `MAX_REQUEST_BYTES` with INVALID_ARGUMENT and the numbers; what gRPC itself
takes is larger, and the same on every hop.
Windows: a default channel swallows 184,000 small messages for a reader that has stopped. `READER_OPTIONS`
keep it to about 44, so that what the reader has not taken is not generated far ahead.
"""

MAX_REQUEST_BYTES = 4 << 20  # of one request at the gateway
MAX_MESSAGE_BYTES = 64 << 20  # of one message on any hop
MAX_METADATA_BYTES = 16 << 10  # of the headers of one call

Options = tuple[tuple[str, int], ...]

COMMON_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Options = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

READER_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
)

# Without it all channels of a process to one address share a connection: 32 clients would be one.
OWN_CONNECTION: Options = (("grpc.use_local_subchannel_pool", 1),)

SERVER_OPTIONS: Options = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a share of the traffic
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
