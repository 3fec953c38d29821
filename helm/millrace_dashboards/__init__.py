"""Grafana dashboards and Prometheus alerts, made from the catalogue of metrics (millrace_common/metrics.py).

`make dashboards` writes them into the chart. boards/*.yaml and rules.yaml have the queries; promql.py
refuses a name, a label or a use that the catalogue does not have.

What is scraped needs these target labels: `namespace`, `pod`, `component` (router, or a worker's role), `model` and
`release`. The chart's monitors set them.
"""
