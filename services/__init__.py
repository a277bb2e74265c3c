"""Shoal: a fleet of small gRPC services that serves large language models."""

import os

__version__ = "0.1.0"

# grpc's C core reads these once, when it is imported: this package is the one place that is always
# earlier. It writes a line for every connection that closes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Shoal's processes fork only to become another program at once. With gRPC's fork handlers one such
# child in sixteen ended by SIGSEGV while other threads were in gRPC (grpcio 1.85, uvloop).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
