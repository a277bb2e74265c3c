"""Tools of a request: what they are, which may be called, and the grammar that forces a call."""
