"""A model's text taken apart: reasoning, content and tool calls, piece by piece as it comes.

    text --> reasoning.py (<think>...</think>) --> tool_calls.py (calls) --> pieces

Whatever the cuts between the pieces of text fed in, the joined output is the same, so a
streamed answer equals the whole one. Nothing here knows of requests or of events.
"""
