"""How much memory a model takes and how many KV pages are left: arithmetic, without torch.

The engine sizes its pool with it, the agent refuses with it what cannot work before a rank is
started, and `shoal plan` tells with it what would fit where.
"""
