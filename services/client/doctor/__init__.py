"""`shoal doctor`: looks at a machine, a model and a fleet before there is trouble."""
