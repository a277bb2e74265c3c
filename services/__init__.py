"""Shoal: a fleet of small gRPC services that serves large language models."""

import os

__version__ = "0.1.0"

# grpc's C core writes a line for every connection that closes, and reads this once, when it is
# imported: this package is the one place that is always earlier.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
