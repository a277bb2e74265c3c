"""`shoal top`: the fleet in a terminal."""
