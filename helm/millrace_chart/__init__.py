"""What is made from the Helm chart, or for it: values.schema.json and the golden renders of k8s/golden.

`make golden` writes both. The part of the schema that says what `router.config` and `workers.*.config` accept is made
from the processes' own configuration models, so that Helm refuses what they would refuse.
"""
