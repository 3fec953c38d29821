"""Breaks of the chart and its tools, for mutants.py. Golden files notice every one, so their test is left out."""

from __future__ import annotations

from millrace_testing.mutants import of

CHART, TOOLS = "helm/millrace/templates", "helm"
FILES = "helm/millrace/files"
VALUES, PODS, INSTALL = "helm/test_values.py", "helm/test_pods.py", "helm/test_install.py"
TLS, RATIO, GATEWAY = "helm/test_tls.py", "helm/test_ratio.py", "helm/test_gateway.py"
PREFLIGHT, FABRICS = "helm/test_preflight.py", "helm/test_fabrics.py"
MUTANTS = (
    # who may talk to whom
    of("policy-workers-for-routers", f"{CHART}/networkpolicy.yaml",
       "from: {{- list $router | toYaml | nindent 8 }}", "from: {{- list $workers | toYaml | nindent 8 }}", VALUES),
    of("policy-metrics-for-everybody", f"{CHART}/networkpolicy.yaml",
       "from: {{- toYaml . | nindent 8 }}", "", VALUES),
    of("policy-any-router-of-any-release", f"{CHART}/networkpolicy.yaml",
       '$router := dict "podSelector" (dict "matchLabels" (include "millrace.selector" $as | fromYaml))',
       '$router := dict "podSelector" dict', VALUES),
    of("egress-no-local-resolver", f"{CHART}/egress.yaml", "169.254.0.0/16", "169.254.0.0/32", VALUES),
    of("account-mounts-its-token", f"{CHART}/rbac.yaml",
       "automountServiceAccountToken: false", "automountServiceAccountToken: true", "helm/test_rbac.py"),
    of("role-of-another-namespace", f"{CHART}/rbac.yaml",
       "namespace: {{ .Release.Namespace }}", "namespace: default", "helm/test_rbac.py"),
    of("admin-ports-on-every-address", f"{CHART}/_config.tpl",
       '"admin" (printf "%s:%d" $router.adminHost', '"admin" (printf "%s:%d" $any', VALUES),
    of("api-keys-always-in-plain-text", f"{CHART}/_config.tpl",
       '"api_keys_plaintext" $.Values.apiKeys.allowPlaintext', '"api_keys_plaintext" true', VALUES),
    # secrets and certificates
    of("router-secrets-readable-by-all", f"{CHART}/router.yaml", "defaultMode: 0440", "defaultMode: 0444", PODS),
    of("worker-key-readable-by-all", f"{CHART}/_worker.tpl",
       '"worker") }}, defaultMode: 0440', '"worker") }}, defaultMode: 0444', PODS),
    of("worker-secret-readable-by-all", f"{CHART}/_worker.tpl",
       "$root }}, defaultMode: 0440", "$root }}, defaultMode: 0444", PODS),
    of("peers-without-certificates", f"{CHART}/_config.tpl",
       "require_client_cert: true", "require_client_cert: false", TLS),
    of("certificate-keeps-its-key", f"{CHART}/certificates.yaml",
       "rotationPolicy: Always", "rotationPolicy: Never", TLS),
    of("certificate-for-servers-alone", f"{CHART}/certificates.yaml", "server auth, client auth", "server auth", TLS),
    of("generated-certificate-without-loopback", f"{CHART}/certificates.yaml",
       '(first $dnsNames) (list "127.0.0.1" "::1")', "(first $dnsNames) list", TLS),
    # life of pods
    of("readiness-waits-for-minutes", f"{CHART}/_pod.tpl", "failureThreshold: 2", "failureThreshold: 60", VALUES),
    of("startup-ends-early", f"{CHART}/_pod.tpl",
       "div (add (int .startup) 4) 5", "div (int .startup) 6", INSTALL, VALUES),
    of("volumes-are-owned-at-every-start", f"{CHART}/_pod.tpl", "OnRootMismatch", "Always", PODS),
    of("router-goes-before-the-next-is-ready", f"{CHART}/router.yaml",
       "maxSurge: 1, maxUnavailable: 0", "maxSurge: 0, maxUnavailable: 1", INSTALL),
    of("two-groups-are-replaced-at-once", f"{CHART}/workers.yaml",
       "rollingUpdateConfiguration: {maxUnavailable: 1,", "rollingUpdateConfiguration: {maxUnavailable: 2,", INSTALL),
    of("group-goes-on-without-a-pod", f"{CHART}/workers.yaml", "RecreateGroupOnPodRestart", "None", INSTALL),
    of("service-of-followers", f"{CHART}/workers.yaml", 'worker-index: "0"', 'worker-index: "1"', VALUES),
    of("metrics-port-leads-to-grpc", f"{CHART}/workers.yaml", "targetPort: metrics", "targetPort: grpc", VALUES),
    of("http-port-leads-to-metrics", f"{CHART}/router.yaml",
       '"targetPort" "http"', '"targetPort" "metrics"', VALUES),
    of("budget-keeps-pods-that-are-not-ready", f"{CHART}/_pod.tpl", "AlwaysAllow", "IfHealthyBudget", INSTALL),
    of("warming-has-no-time", f"{CHART}/warm.yaml",
       "activeDeadlineSeconds: {{ int .startup }}", "activeDeadlineSeconds: 60", INSTALL),
    of("host-tier-of-all-pods-in-each", f"{CHART}/_worker.tpl",
       "$replicas := div (int .dp) (int .size)", "$replicas := int .dp", "helm/test_tiers.py"),
    of("roles-beside-themselves-alone", f"{CHART}/_fabric.tpl",
       'ternary "decode" "prefill"', 'ternary "prefill" "decode"', FABRICS),
    # autoscaling and gateways
    of("autoscaler-shrinks-at-once", f"{CHART}/autoscaling.yaml",
       '"stabilizationWindowSeconds" $scaling.scaleDownSeconds', '"stabilizationWindowSeconds" 0', RATIO),
    of("keda-never-grows", f"{CHART}/autoscaling.yaml",
       "maxReplicaCount: {{ int $scaling.maxReplicas }}", "maxReplicaCount: {{ int $scaling.minReplicas }}", RATIO),
    of("route-cuts-long-answers", f"{CHART}/gateway.yaml", "request: 0s", "request: 15s", GATEWAY),
    of("route-for-admin-paths", f"{CHART}/gateway.yaml", "value: /v1}", "value: /}", GATEWAY),
    of("picker-that-always-fails-open", f"{CHART}/gateway.yaml",
       "{{ $pool.endpointPicker.failureMode }}", "FailOpen", GATEWAY),
    of("monitor-calls-routers-workers", f"{CHART}/monitoring.yaml",
       "- {targetLabel: component, replacement: router}", "- {targetLabel: component, replacement: worker}",
       "helm/test_monitoring.py"),
    # scripts in pods
    of("preflight-takes-ports-that-are-down", f"{FILES}/preflight.py",
       "options.nics) if port.state == ACTIVE]", "options.nics)]", PREFLIGHT),
    of("preflight-takes-few-rails", f"{FILES}/preflight.py", "if len(near) >= needed:", "if near:", PREFLIGHT),
    of("preflight-ignores-exclude", f"{FILES}/preflight.py", "return wanted and not left_out and", "return wanted and",
       PREFLIGHT),
    of("preflight-overwrites-the-user", f"{FILES}/preflight.py", "if name not in os.environ}", "}", PREFLIGHT),
    of("preflight-waits-as-often", f"{FILES}/preflight.py", "min(2 * pause, PAUSES_S[1])", "PAUSES_S[0]", PREFLIGHT),
    of("helm-test-without-transfer", f"{FILES}/helm_test.py",
       "kv_bytes(ask, options.decode) > before,", "kv_bytes(ask, options.decode) >= before,", "helm/test_request.py"),
    # tools
    of("mirror-forgets-init-containers", f"{TOOLS}/millrace_chart/mirror.py",
       'for key in ("initContainers", "containers"):', 'for key in ("containers",):', "helm/test_images.py"),
    of("mirror-keeps-the-registry", f"{TOOLS}/millrace_chart/mirror.py", "{HOST.sub('', name)}", "{name}",
       "helm/test_images.py"),
    of("schema-keeps-owned-keys", f"{TOOLS}/millrace_chart/config_schema.py",
       'del schema["properties"][section]["properties"][key]', "pass", "helm/test_refusals.py"),
    of("colors-of-low-limits-upside-down", f"{TOOLS}/millrace_dashboards/grafana.py",
       '[*colors, "green"] if low', '["green", *colors] if low', "dashboards/test_dashboards.py"),
    of("rules-of-every-deployment", f"{TOOLS}/millrace_dashboards/alerts.py",
       'scoped(said["value"], matchers)', 'said["value"]', "dashboards/test_dashboards.py"),
    of("cluster-test-accepts-leftovers", f"{TOOLS}/millrace_cluster/decide.py",
       "return sorted(new.keys() - set(kept)), sorted(kept)", "return [], sorted(kept)", "helm/test_cluster_test.py"),
)  # fmt: skip
