"""`make cluster-test`: installs the chart on a real cluster and proves there what no render can show."""
