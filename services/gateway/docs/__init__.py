"""The REST API described: an OpenAPI document, and a page of it that needs nothing else."""
