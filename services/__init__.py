"""Shoal: a fleet of small gRPC services that serves large language models."""

import os

__version__ = "0.1.0"

# grpc's C core reads these once, when it is imported: this package is the one place that is always
# earlier. It writes a line for every connection that closes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Shoal's processes fork only to become another program at once. With gRPC's fork handlers one such
# child in sixteen ended by SIGSEGV while other threads were in gRPC (grpcio 1.85, uvloop).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its older poller reads a socket in the thread that hands the message to the event loop, where the
# newer one wakes two more: a message there and back took 0.74 ms instead of 1.0, and a third less
# CPU time on both sides (grpcio 1.85, unix sockets). A release without the older one ignores this.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
