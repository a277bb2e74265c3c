"""Live sessions to the services behind the gateway, and the pools they stand in."""
