"""What every process has: configuration, log, metrics, traces, names of pages. No RPC."""
