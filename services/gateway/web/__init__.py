"""The page at /: its source in src/, what `make web` makes of it in bundle/, and its routes."""
