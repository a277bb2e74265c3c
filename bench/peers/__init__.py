"""Shoal and its peers, measured side by side in one run."""
