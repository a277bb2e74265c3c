"""Fetches a model ahead of the services that read it."""
