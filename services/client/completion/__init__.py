"""`shoal completion`: the script by which a shell completes commands and flags."""
