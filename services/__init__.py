"""Shoal: a fleet of small gRPC services that serves large language models."""

__version__ = "0.1.0"
