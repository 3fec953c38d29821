"""Make values.schema.json. It refuses unknown keys, except inside objects that Kubernetes defines."""

import json
from typing import Any

from millrace_common.config import LONGEST_S
from millrace_common.spans import Tracing

from millrace_chart.config_schema import config_schemas, plain

Schema = dict[str, Any]

INT32 = 2**31 - 1  # the largest number of most fields of Kubernetes
BOOL: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NODE_PORT: Schema = {"type": ["integer", "null"], "minimum": 30000, "maximum": 32767}
SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": LONGEST_S}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": INT32}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": INT32}
ANY_OBJECT: Schema = {"type": "object"}  # Kubernetes defines and checks it
VARIABLE_NAME: Schema = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
VARIABLES: Schema = {
    "type": "object",
    "propertyNames": VARIABLE_NAME,
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
ENV: Schema = {  # a map becomes a valueFrom
    "type": "object",
    "propertyNames": VARIABLE_NAME,
    "additionalProperties": {
        "type": ["string", "number", "boolean", "object"],
        "propertyNames": {"enum": ["secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"]},
        "minProperties": 1,
        "maxProperties": 1,
    },
}
MEMORY: Schema = {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?[MGT]i?$", "minimum": 1 << 20}
FOLDER: Schema = {"type": "string", "pattern": "^(/.*)?$"}
REGISTRY: Schema = {"type": "string", "pattern": "^[A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._/-]*)?$"}  # no https://
AMOUNT: Schema = {"type": ["integer", "string"], "pattern": "^(100|[1-9]?[0-9])%$", "minimum": 0, "maximum": INT32}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
SHORT_NAME: Schema = {**NAME, "maxLength": 40}  # with a pool's name it fits into a label
LABEL: Schema = {"type": "string", "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", "maxLength": 63}
IDENTITY: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": INT32}  # of a user or group
KEY: Schema = {  # of a label or an annotation
    "type": "string",
    "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    "maxLength": 317,
}
LABELS: Schema = {"type": "object", "propertyNames": KEY, "additionalProperties": LABEL}
ANNOTATIONS: Schema = {"type": "object", "propertyNames": KEY, "additionalProperties": TEXT}
OPTIONAL_KEY: Schema = {**KEY, "pattern": f"^({KEY['pattern'][1:-1]})?$"}
DATA_KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}  # of a Secret or ConfigMap
NAMED: Schema = {"type": "object", "required": ["name"]}  # Kubernetes, or templates/_checks.tpl, checks the rest
CONTAINER: Schema = {"type": "object", "required": ["name", "image"]}
MOUNT: Schema = {"type": "object", "required": ["name", "mountPath"]}
DEVICE: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"}  # the name of an RDMA device, or its first letters
COUNT_OR_NULL: Schema = {"type": ["integer", "null"], "minimum": 0, "maximum": INT32}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def closed(**properties: Schema) -> Schema:
    """Return the schema of an object that has no other properties."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


IMAGE = closed(
    repository={"type": "string", "pattern": "^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9._/-]*$"},
    tag={"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"},
    digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    pullPolicy=one_of("Always", "IfNotPresent", "Never"),
)
MODEL = closed(
    name={"type": "string", "minLength": 1},
    source=one_of("image", "pvc", "hostPath", "hf", "s3", "oci"),
    path=TEXT,
    claim=NAME,
    hostPath=FOLDER,
    uri=TEXT,
    revision=TEXT,
    secretName=NAME,
    routedExperts=COUNT,
)
CACHE = closed(kind=one_of("emptyDir", "hostPath", "pvc"), size=MEMORY, hostPath=FOLDER, claim=NAME, warm=BOOL)
DISK_CACHE = closed(kind=one_of("", "emptyDir", "hostPath", "pvc"), size=MEMORY, hostPath=FOLDER, claim=NAME)
DRAIN = closed(preStop=SECONDS, timeout=SECONDS)
PDB = closed(enabled=BOOL, maxUnavailable=AMOUNT)
AMOUNTS: Schema = {
    "type": "object",
    "propertyNames": {
        "pattern": "^(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|[-a-z0-9.]+/[-A-Za-z0-9_.]{1,63})$"
    },
    "additionalProperties": {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?$"},
}
RESOURCES = closed(requests=AMOUNTS, limits=AMOUNTS)
POD = {"resources": RESOURCES, "scheduling": ref("scheduling"), "podLabels": LABELS, "podAnnotations": ANNOTATIONS}
JOBS = closed(
    **POD,
    serviceAccountName=NAME,
    ttlSecondsAfterFinished=COUNT_OR_NULL,
    caBundle=closed(configMapName=NAME, key=DATA_KEY),
    env=ENV,
    extraVolumes=list_of(NAMED),
    extraVolumeMounts=list_of(MOUNT),
)
TEST = closed(**POD, timeout=POSITIVE, apiKey=closed(secretName=NAME, key=DATA_KEY))
SCHEDULING = closed(
    nodeSelector=LABELS,
    tolerations=list_of(ANY_OBJECT),
    affinity=closed(nodeAffinity=ANY_OBJECT, podAffinity=ANY_OBJECT, podAntiAffinity=ANY_OBJECT),
    **dict.fromkeys(("priorityClassName", "schedulerName", "runtimeClassName"), NAME),
    spread={**list_of(KEY), "uniqueItems": True},
)
PODS = {  # keys of routers and workers
    **POD,
    "config": {},
    "drain": DRAIN,
    "terminationGracePeriodSeconds": COUNT_OR_NULL,
    "pdb": PDB,
    "replicas": COUNT_OR_NULL,
    "labels": LABELS,
    "annotations": ANNOTATIONS,
    "env": ENV,
    "envFrom": list_of(ANY_OBJECT),
    "extraVolumes": list_of(NAMED),
    "extraVolumeMounts": list_of(MOUNT),
    "extraContainers": list_of(CONTAINER),
    "extraInitContainers": list_of(CONTAINER),
    "hostNetwork": BOOL,
    "dnsPolicy": one_of("", "ClusterFirst", "ClusterFirstWithHostNet", "Default"),
    "resourceClaims": list_of(NAMED),
}
PEER = {**closed(podSelector=ANY_OBJECT, namespaceSelector=ANY_OBJECT, ipBlock=ANY_OBJECT), "minProperties": 1}
PEERS = list_of(PEER)
RULES = list_of(closed(to=PEERS, ports=list_of(ANY_OBJECT)))
PORTS: Schema = {**list_of(PORT), "minItems": 1}
EGRESS = closed(enabled=BOOL, apiServer=PEERS, apiServerPorts=PORTS, download=PEERS, downloadPorts=PORTS, more=RULES)
OPEN: Schema = {}  # Kubernetes defines and checks it
SERVICE = closed(
    **dict.fromkeys(("externalIPs", "ipFamilies", "loadBalancerClass", "loadBalancerIP"), OPEN),
    **dict.fromkeys(("loadBalancerSourceRanges", "sessionAffinityConfig", "trafficDistribution"), OPEN),
    **dict.fromkeys(("externalTrafficPolicy", "internalTrafficPolicy"), one_of("Cluster", "Local")),
    allocateLoadBalancerNodePorts=BOOL,
    healthCheckNodePort=NODE_PORT,
    ipFamilyPolicy=one_of("SingleStack", "PreferDualStack", "RequireDualStack"),
    sessionAffinity=one_of("None", "ClientIP"),
)
ROUTER = closed(
    **{**PODS, "config": ref("routerConfig")},
    ports=closed(grpc=PORT, http=PORT, admin=PORT, adminHttp=PORT, metrics=PORT, health=PORT),
    adminHost=TEXT,
    service=closed(
        type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
        annotations=ANNOTATIONS,
        nodePorts=closed(grpc=NODE_PORT, http=NODE_PORT),
        spec=SERVICE,
    ),
    autoscaling=closed(
        kind=one_of("none", "hpa"),
        minReplicas=POSITIVE,
        maxReplicas=POSITIVE,
        cpuUtilization={"type": "integer", "minimum": 1, "maximum": 100},
    ),
)
WORKER = closed(
    **{**PODS, "config": ref("workerConfig")},
    role=one_of("", "prefill", "decode", "unified", "flexible"),
    kind=one_of("deployment", "statefulset", "lws"),
    size=POSITIVE,
    dp=POSITIVE,
    tp=POSITIVE,
    gpus=COUNT,
    gpuResource=OPTIONAL_KEY,
    gpuModel=TEXT,
    guaranteed=BOOL,
    revision=LABEL,
    image=ref("image"),
    model=ref("model"),
    diskCache=DISK_CACHE,
    ports=closed(grpc=PORT, metrics=PORT, health=PORT),
    shm=MEMORY,
    tmp=MEMORY,
    startup=SECONDS,
    autoscaling=closed(
        kind=one_of("none", "hpa", "keda"),
        minReplicas=POSITIVE,
        maxReplicas=POSITIVE,
        metric={"type": "string", "pattern": "^[a-z0-9_:]*$"},
        query=TEXT,
        target={"type": ["string", "number"], "pattern": "^([0-9]+(\\.[0-9]+)?[mkM]?)?$", "exclusiveMinimum": 0},
        prometheus=TEXT,
        scaleDownSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    ),
    topology=closed(key=OPTIONAL_KEY, mode=one_of("preferred", "required", "exclusive")),
    gang=closed(kind=one_of("none", "kueue", "volcano"), queue={**NAME, "maxLength": 63}),
    serviceAccountName=NAME,
)
SECRET = closed(secretName=NAME, key=DATA_KEY)
RAY = closed(
    auth=SECRET,
    ports=closed(
        **dict.fromkeys(("gcs", "nodeManager", "objectManager", "runtimeEnv", "dashboardAgent", "metrics"), PORT),
        dashboardAgentGrpc=PORT,
        workers=closed(min=PORT, max=PORT),
    ),
)
WORKER["type"] = ["object", "null"]  # with anyOf every message would begin with "must validate at least one schema"


def fabric(presets: list[str]) -> Schema:
    return closed(
        preset=one_of("", *presets),
        allowTcp=BOOL,
        nics=COUNT,
        devices=list_of(DEVICE),
        exclude=list_of(DEVICE),
        link=one_of("", "InfiniBand", "Ethernet"),
        resources={"type": ["object", "null"], "propertyNames": KEY, "additionalProperties": COUNT},
        capabilities={"type": ["array", "null"], "items": {"type": "string", "pattern": "^[A-Z_]+$"}},
        annotations=ANNOTATIONS,
        env=VARIABLES,
        privileged=BOOL,
        acknowledgePrivileged=BOOL,
    )


TLS = closed(
    mode=one_of("off", "generated", "certManager", "secrets"),
    issuerRef=closed(name=NAME, kind=one_of("Issuer", "ClusterIssuer"), group=TEXT),
    duration={"type": "string", "pattern": "^[1-9][0-9]*h$"},
    routerSecret=NAME,
    workerSecret=NAME,
    publicSecret=NAME,
)
URL = {"type": "string", "pattern": "^(https?://.*)?$"}
MONITORING = closed(
    enabled={"enum": [True, False, "auto"]},
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    labels=LABELS,
    rules=BOOL,
    runbooks=URL,
    grafana=URL,
    disabledAlerts=list_of({"type": "string", "pattern": "^Millrace[A-Za-z]+$"}),
    dcgm=BOOL,
    vllmNames=BOOL,
    dashboards=closed(enabled=BOOL, labels=LABELS, annotations=ANNOTATIONS),
)
HOSTNAME: Schema = {"type": "string", "pattern": "^([*][.])?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PARENT = {
    **closed(name=NAME, namespace=NAME, sectionName=NAME, port=PORT, group=TEXT, kind=TEXT),
    "required": ["name"],
}
ROUTE = closed(enabled=BOOL, parentRefs=list_of(PARENT), hostnames=list_of(HOSTNAME))
GATEWAY = closed(
    httpRoute=ROUTE,
    grpcRoute=ROUTE,
    backendTLS=closed(kind=one_of("none", "policy", "own"), hostname=NAME, caConfigMap=NAME),
    inferencePool=closed(
        enabled=BOOL, endpointPicker=closed(name=NAME, port=PORT, failureMode=one_of("FailOpen", "FailClose"))
    ),
)


def whole(schema: Schema, given: Any, definitions: Schema) -> Schema:
    """Return the schema of a value of values.yaml, which is `given` there. Helm takes away a key that is null. So those
    keys are required for which nothing is no value: not what may be empty, or null.
    """
    section = definitions.get(schema.get("$ref", "").rpartition("/")[2], schema)
    if not (isinstance(given, dict) and given and "properties" in section):
        return schema
    made = {key: whole(child, given.get(key), definitions) for key, child in section["properties"].items()}
    return {**section, "properties": made, "required": [key for key in made if _needed(given.get(key), made[key])]}


def _needed(given: Any, schema: Schema) -> bool:
    if isinstance(given, dict | list):
        return bool(given) and bool({"properties", "minItems"} & schema.keys())
    return given not in (None, "") and "null" not in schema.get("type", ())


def values_schema(fabrics: list[str], given: Any) -> Schema:
    """Return the whole schema. `fabrics` are the names in files/fabrics.yaml, `given` is values.yaml."""
    values = closed(
        nameOverride=SHORT_NAME,
        fullnameOverride=SHORT_NAME,
        labels=LABELS,
        annotations=ANNOTATIONS,
        imagePullSecrets=list_of({**closed(name=NAME), **NAMED}),
        logLevel=one_of("DEBUG", "INFO", "WARNING", "ERROR"),
        ipFamily=one_of("IPv4", "IPv6"),
        images=closed(registry=REGISTRY, **dict.fromkeys(("router", "worker", "gpuWorker", "download"), ref("image"))),
        model=ref("model"),
        cache=CACHE,
        jobs=JOBS,
        discovery=closed(objects=one_of("pods", "endpointslices")),
        router=ROUTER,
        workerDefaults=ref("worker"),
        workers={
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]([-a-z0-9]{0,19}[a-z0-9])?$"},
            "additionalProperties": ref("worker"),
        },
        ray=RAY,
        fabric=fabric(fabrics),
        tls=TLS,
        apiKeys=closed(secretName=NAME, key=DATA_KEY, allowPlaintext=BOOL),
        secret=SECRET,
        tracing=plain(Tracing.model_json_schema(), {}),
        serviceAccount=closed(create=BOOL, name=NAME, annotations=ANNOTATIONS),
        rbac=closed(create=BOOL),
        podSecurity=closed(runAsUser=IDENTITY, fsGroup=IDENTITY, seccompProfile=ANY_OBJECT, workersAsRoot=BOOL),
        networkPolicy=closed(
            enabled=BOOL,
            clients=PEERS,
            monitoring=PEERS,
            egress=EGRESS,
        ),
        monitoring=MONITORING,
        gateway=GATEWAY,
        test=TEST,
        extraObjects=list_of(ANY_OBJECT),
    )
    values["properties"]["global"] = ANY_OBJECT  # Helm's own
    definitions = {"image": IMAGE, "model": MODEL, "scheduling": SCHEDULING, "worker": WORKER, **config_schemas()}
    values = whole(values, given, definitions)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **values, "definitions": definitions}


def text(fabrics: list[str], given: Any) -> str:
    return json.dumps(values_schema(fabrics, given), indent=1) + "\n"
