"""values.schema.json: what every value may be. Unknown keys are refused everywhere but in what Kubernetes defines."""

from __future__ import annotations

import json
from typing import Any

from millrace_chart.config_schema import config_schemas

Schema = dict[str, Any]

BOOL: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Schema = {"type": "integer", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
ANY_OBJECT: Schema = {"type": "object"}  # of Kubernetes' own types
STRINGS: Schema = {"type": "object", "additionalProperties": TEXT}
VARIABLES: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
QUANTITY: Schema = {"type": ["string", "number"], "pattern": "^[0-9.]+([kMGT]|[KMGT]i)?$"}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
REPLICAS: Schema = {"type": ["integer", "null"], "minimum": 0}
ROLES = ("prefill", "decode", "unified")


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def closed(**properties: Schema) -> Schema:
    """An object with these properties at most."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


IMAGE = closed(
    repository=TEXT,
    tag=TEXT,
    digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    pullPolicy=one_of("Always", "IfNotPresent", "Never"),
)
MODEL = closed(
    name={"type": "string", "minLength": 1},
    source=one_of("image", "pvc", "hostPath", "hf", "s3", "oci"),
    path=TEXT,
    claim=NAME,
    hostPath=TEXT,
    uri=TEXT,
    revision=TEXT,
    secretName=NAME,
    routedExperts=COUNT,
)
CACHE = closed(kind=one_of("emptyDir", "hostPath", "pvc"), size=QUANTITY, hostPath=TEXT, claim=NAME)
DRAIN = closed(preStop=SECONDS, timeout=SECONDS)
PDB = closed(enabled=BOOL, maxUnavailable={"type": ["integer", "string"]})
RESOURCES = closed(requests=ANY_OBJECT, limits=ANY_OBJECT)
SCHEDULING = closed(
    nodeSelector=STRINGS,
    tolerations=list_of(ANY_OBJECT),
    affinity=ANY_OBJECT,
    priorityClassName=TEXT,
    schedulerName=TEXT,
    runtimeClassName=TEXT,
    spread=list_of(TEXT),
)
PODS = {  # routers and workers alike
    "config": {},
    "drain": DRAIN,
    "terminationGracePeriodSeconds": SECONDS,
    "resources": RESOURCES,
    "pdb": PDB,
    "replicas": REPLICAS,
    "scheduling": ref("scheduling"),
    "env": VARIABLES,
    "podLabels": STRINGS,
    "podAnnotations": STRINGS,
}
ROUTER = closed(
    **{**PODS, "config": ref("routerConfig")},
    ports=closed(grpc=PORT, http=PORT, admin=PORT, adminHttp=PORT, metrics=PORT, health=PORT),
    adminHost=TEXT,
    service=closed(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=STRINGS),
    autoscaling=closed(
        kind=one_of("none", "hpa"),
        minReplicas=POSITIVE,
        maxReplicas=POSITIVE,
        cpuUtilization={"type": "integer", "minimum": 1, "maximum": 100},
    ),
)
WORKER = closed(
    **{**PODS, "config": ref("workerConfig")},
    role=one_of("", *ROLES),
    kind=one_of("statefulset", "deployment", "lws"),
    size=POSITIVE,
    dp=POSITIVE,
    tp=POSITIVE,
    gpus=COUNT,
    gpuResource={"type": "string", "minLength": 1},
    ports=closed(grpc=PORT, metrics=PORT, health=PORT),
    shm=QUANTITY,
    startup=SECONDS,
    autoscaling=closed(
        kind=one_of("none", "hpa", "keda"),
        minReplicas=POSITIVE,
        maxReplicas=POSITIVE,
        metric={"type": "string", "pattern": "^[a-z0-9_:]*$"},
        query=TEXT,
        target={"type": ["string", "number"]},
        prometheus=TEXT,
        scaleDownSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    ),
    topologyKey=TEXT,
)
RAY = closed(
    ports=closed(
        gcs=PORT,
        nodeManager=PORT,
        objectManager=PORT,
        runtimeEnv=PORT,
        dashboardAgent=PORT,
        metrics=PORT,
        workers=closed(min=PORT, max=PORT),
    )
)


def fabric(presets: list[str]) -> Schema:
    return closed(
        preset=one_of("", *presets),
        allowTcp=BOOL,
        nics=COUNT,
        resources={"type": ["object", "null"], "additionalProperties": COUNT},
        annotations=STRINGS,
        env=VARIABLES,
        privileged=BOOL,
        acknowledgePrivileged=BOOL,
    )


TLS = closed(
    mode=one_of("off", "certManager", "secrets"),
    issuerRef=closed(name=NAME, kind=one_of("Issuer", "ClusterIssuer"), group=TEXT),
    duration={"type": "string", "pattern": "^[0-9]+h$"},
    routerSecret=NAME,
    workerSecret=NAME,
    publicSecret=NAME,
)
MONITORING = closed(
    enabled=BOOL,
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    labels=STRINGS,
    rules=BOOL,
    dashboards=closed(enabled=BOOL, labels=STRINGS, annotations=STRINGS),
)
GATEWAY = closed(
    httpRoute=closed(enabled=BOOL, parentRefs=list_of(ANY_OBJECT), hostnames=list_of(TEXT)),
    inferencePool=closed(
        enabled=BOOL, endpointPicker=closed(name=NAME, port=PORT, failureMode=one_of("FailOpen", "FailClose"))
    ),
)


def values_schema(fabrics: list[str]) -> Schema:
    """`fabrics`: the names of files/fabrics.yaml."""
    values = closed(
        nameOverride=NAME,
        fullnameOverride=NAME,
        labels=STRINGS,
        imagePullSecrets=list_of(closed(name=NAME)),
        logLevel=one_of("DEBUG", "INFO", "WARNING", "ERROR"),
        images=closed(router=IMAGE, worker=IMAGE, download=IMAGE),
        model=MODEL,
        cache=CACHE,
        discovery=closed(objects=one_of("pods", "endpointslices")),
        router=ROUTER,
        workerDefaults=ref("worker"),
        workers={
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]([-a-z0-9]{0,19}[a-z0-9])?$"},
            "additionalProperties": {"anyOf": [ref("worker"), {"type": "null"}]},
        },
        ray=RAY,
        fabric=fabric(fabrics),
        tls=TLS,
        apiKeys=closed(secretName=NAME, key=TEXT),
        tracing=closed(endpoint=TEXT, sample={"type": "number", "minimum": 0, "maximum": 1}),
        serviceAccount=closed(create=BOOL, name=NAME, annotations=STRINGS),
        rbac=closed(create=BOOL),
        podSecurity=closed(runAsUser=POSITIVE, fsGroup=POSITIVE, seccompProfile=ANY_OBJECT),
        networkPolicy=closed(enabled=BOOL, clients=list_of(ANY_OBJECT), monitoring=list_of(ANY_OBJECT)),
        monitoring=MONITORING,
        gateway=GATEWAY,
        test=closed(timeout=POSITIVE, apiKey=closed(secretName=NAME, key=TEXT)),
        extraObjects=list_of(ANY_OBJECT),
    )
    values["properties"]["global"] = ANY_OBJECT  # Helm's own
    definitions = {"scheduling": SCHEDULING, "worker": WORKER, **config_schemas()}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **values, "definitions": definitions}


def text(fabrics: list[str]) -> str:
    return json.dumps(values_schema(fabrics), indent=1) + "\n"
