{{/* What a Gateway cannot do with the routers. */}}

{{- define "millrace.checkGateway" -}}
{{- $gateway := .Values.gateway -}}
{{- $routes := list -}}
{{- range $name := list "httpRoute" "grpcRoute" -}}
{{- $route := index $gateway $name -}}
{{- if $route.enabled -}}
{{- $routes = append $routes $name -}}
{{- if not $route.parentRefs -}}
{{- fail (printf "gateway.%s.parentRefs: required, the route belongs to a Gateway" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (len $routes) 2 -}}
{{- include "millrace.checkHostnames" $gateway -}}
{{- end -}}
{{- $pool := $gateway.inferencePool -}}
{{- if and $pool.enabled (not $pool.endpointPicker.name) -}}
{{- fail "gateway.inferencePool.endpointPicker.name: required, an InferencePool always has one" -}}
{{- end -}}
{{- if or $routes $pool.enabled (eq $gateway.backendTLS.kind "policy") -}}
{{- include "millrace.checkBackendTLS" . -}}
{{- end -}}
{{- end -}}

{{/* A listener takes an HTTPRoute or a GRPCRoute for a hostname, not both; without a hostname a route is for all of them */}}
{{- define "millrace.checkHostnames" -}}
{{- $same := eq (toJson .httpRoute.parentRefs) (toJson .grpcRoute.parentRefs) -}}
{{- $all := or (not .httpRoute.hostnames) (not .grpcRoute.hostnames) -}}
{{- if and $same $all -}}
{{- fail "gateway.grpcRoute.hostnames: a listener cannot have both routes for one hostname; give both of them hostnames" -}}
{{- end -}}
{{- range .grpcRoute.hostnames -}}
{{- if and $same (has . $.httpRoute.hostnames) -}}
{{- fail (printf "gateway.grpcRoute.hostnames: %s is one of httpRoute, a listener cannot have both" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkBackendTLS" -}}
{{- $tls := .Values.tls -}}
{{- $backend := .Values.gateway.backendTLS -}}
{{- if and (ne $tls.mode "off") (eq $backend.kind "none") -}}
{{- fail "gateway.backendTLS.kind: must be policy or own with tls: the Gateway would speak plain HTTP to routers" -}}
{{- end -}}
{{- if eq $backend.kind "policy" -}}
{{- if eq $tls.mode "off" -}}
{{- fail "gateway.backendTLS.kind: policy needs tls.mode generated, certManager or secrets" -}}
{{- end -}}
{{- if not (or $tls.publicSecret (eq $tls.mode "generated")) -}}
{{- fail "tls.publicSecret: required with gateway.backendTLS.kind=policy, else routers ask for a client certificate" -}}
{{- end -}}
{{- if not $backend.hostname -}}
{{- fail "gateway.backendTLS.hostname: required with kind=policy, a name in the certificate of the public APIs" -}}
{{- end -}}
{{- if .Values.gateway.inferencePool.enabled -}}
{{- fail "gateway.backendTLS.kind: policy is for a Service; with inferencePool it must be own" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How an endpoint picker tells busy routers from others: the llm-d router 0.8 and that of the Gateway API inference
     extension 1.5 read it with --config-file, and need --model-server-metrics-port with the routers' port. Each router
     sees the KV pages of all workers, so their use says nothing about routers. */}}
{{- define "millrace.endpointPicker" -}}
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: metrics-data-source, parameters: {scheme: http, path: /metrics}}
  - type: core-metrics-extractor
    parameters:
      defaultEngine: millrace
      engineConfigs:
        - name: millrace
          queuedRequestsSpec: millrace_queue_requests
          runningRequestsSpec: millrace_active_requests
  - {type: queue-scorer}
  - {type: running-requests-size-scorer}
  - {type: single-profile-handler}
  - {type: max-score-picker}
dataLayer:
  sources:
    - {pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: running-requests-size-scorer, weight: 1}
      - {pluginRef: max-score-picker}
{{- end -}}
