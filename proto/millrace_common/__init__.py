"""The common parts of all processes: configuration, log, metrics, traces, page hashes. No RPC."""
