"""`shoal plan`: what a model takes of a GPU or a machine, and what is left for requests."""
