"""Structural schemas of the custom resources that the chart makes, after the documentation of each project.

They know the fields that we use, their types and what is required; an unknown field is an error. The CRDs themselves
are large, and are not kept here. apiVersion: {kind: schema of `spec`}.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANY: Schema = {"type": "object"}
DURATION: Schema = {"type": "string", "pattern": r"^(([0-9]+)y)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?$"}


def closed(required: str = "", **properties: Schema) -> Schema:
    """`required`: names, separated by spaces."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required.split()}


def enum(*values: str) -> Schema:
    return {"enum": list(values)}


def array(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


POD = closed("metadata spec", metadata=ANY, spec=ANY)
LWS = closed(
    "leaderWorkerTemplate",
    replicas=COUNT,
    startupPolicy=enum("LeaderCreated", "LeaderReady"),
    rolloutStrategy=closed(
        "type",
        type=enum("RollingUpdate"),
        rollingUpdateConfiguration=closed(maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
    ),
    leaderWorkerTemplate=closed(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=enum("RecreateGroupOnPodRestart", "None", "RecreateGroupAfterStart"),
        leaderTemplate=POD,
        workerTemplate=POD,
    ),
)
POLICY = closed("type value periodSeconds", type=enum("Pods", "Percent"), value=COUNT, periodSeconds=COUNT)
RULES = closed(stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600}, policies=array(POLICY))
SCALED_OBJECT = closed(
    "scaleTargetRef triggers",
    scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    fallback=closed("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
    advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=closed(scaleUp=RULES, scaleDown=RULES))),
    triggers=array(
        closed(
            "type metadata",
            type=enum("prometheus"),
            metricType=enum("AverageValue", "Value"),
            metadata=closed("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
        )
    ),
)
RELABELING = closed(
    sourceLabels=array({"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}), targetLabel=TEXT, replacement=TEXT
)
ENDPOINT = closed(port=TEXT, interval=DURATION, relabelings=array(RELABELING))
SELECTOR = closed(matchLabels=ANY, matchExpressions=array(closed("key operator", key=TEXT, operator=TEXT, values=ANY)))
SELECTOR["properties"]["matchExpressions"]["items"]["properties"]["values"] = array(TEXT)
RULE = closed("expr", alert=TEXT, record=TEXT, expr=TEXT, labels=ANY, annotations=ANY, **{"for": DURATION})
RULE["properties"]["keep_firing_for"] = DURATION
ISSUER_REF = closed("name", name=TEXT, kind=enum("Issuer", "ClusterIssuer"), group=TEXT)
USAGES = enum("digital signature", "server auth", "client auth")
CERTIFICATE = closed(
    "secretName issuerRef",
    secretName=TEXT,
    issuerRef=ISSUER_REF,
    isCA={"type": "boolean"},
    commonName={"type": "string", "maxLength": 64},
    duration=DURATION,
    privateKey=closed(algorithm=enum("ECDSA", "RSA", "Ed25519"), size=COUNT, rotationPolicy=enum("Always", "Never")),
    usages=array(USAGES),
    dnsNames=array(TEXT),
)
PORT_NUMBER: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
HTTP_ROUTE = closed(
    parentRefs=array(closed("name", group=TEXT, kind=TEXT, namespace=TEXT, name=TEXT, sectionName=TEXT)),
    hostnames=array(TEXT),
    rules=array(
        closed(
            matches=array(closed(path=closed(type=enum("Exact", "PathPrefix"), value=TEXT))),
            timeouts=closed(request=DURATION, backendRequest=DURATION),
            backendRefs=array(closed("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT_NUMBER)),
        )
    ),
)
INFERENCE_POOL = closed(
    "selector targetPorts endpointPickerRef",
    selector=closed("matchLabels", matchLabels=ANY),
    targetPorts={**array(closed("number", number=PORT_NUMBER)), "maxItems": 8},
    endpointPickerRef=closed(
        "name",
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=closed("number", number=PORT_NUMBER),
        failureMode=enum("FailOpen", "FailClose"),
    ),
)
CRDS: dict[str, dict[str, Schema]] = {
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": LWS},
    "keda.sh/v1alpha1": {"ScaledObject": SCALED_OBJECT},
    "monitoring.coreos.com/v1": {
        "PodMonitor": closed("selector podMetricsEndpoints", selector=SELECTOR, podMetricsEndpoints=array(ENDPOINT)),
        "ServiceMonitor": closed("selector endpoints", selector=SELECTOR, endpoints=array(ENDPOINT)),
        "PrometheusRule": closed(
            "groups", groups=array(closed("name rules", name=TEXT, interval=DURATION, rules=array(RULE)))
        ),
    },
    "cert-manager.io/v1": {
        "Issuer": {
            "oneOf": [closed("selfSigned", selfSigned=closed()), closed("ca", ca=closed("secretName", secretName=TEXT))]
        },
        "Certificate": CERTIFICATE,
    },
    "gateway.networking.k8s.io/v1": {"HTTPRoute": HTTP_ROUTE},
    "inference.networking.k8s.io/v1": {"InferencePool": INFERENCE_POOL},
}
