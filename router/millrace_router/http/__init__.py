"""HTTP of every port: guards, API keys, bodies, answers, probes."""
