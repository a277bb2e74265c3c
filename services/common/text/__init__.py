"""Vocabularies, and text from token ids: for the detokenizer, the gateway and the worker."""
