"""POST /v1/responses: items in, items out, nothing kept.

A body is read as the chat body that asks for the same (`request`), and the output's pieces
are written as items and typed events (`items`, `answer`).
"""
