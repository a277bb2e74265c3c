"""What every Shoal service needs and none owns: errors, config, gRPC set-up, logs, metrics."""
