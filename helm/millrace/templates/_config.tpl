{{/* The configuration files of routers and workers. Their models refuse unknown keys; the tests load every one. */}}

{{- define "millrace.tlsConfig" -}}
cert: /etc/millrace/tls/tls.crt
key: /etc/millrace/tls/tls.key
ca: /etc/millrace/tls/ca.crt
require_client_cert: true
server_name: {{ include "millrace.workerName" . }}
{{- end -}}

{{- define "millrace.selectorText" -}}
app.kubernetes.io/name={{ include "millrace.name" . }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component in (prefill,decode,unified)
{{- end -}}

{{- define "millrace.routerConfig" -}}
{{- $router := .Values.router -}}
{{- $ports := $router.ports -}}
{{- $config := dict
  "model" (include "millrace.modelPath" .)
  "grpc" (printf "0.0.0.0:%d" (int $ports.grpc))
  "http" (printf "0.0.0.0:%d" (int $ports.http))
  "admin" (printf "%s:%d" $router.adminHost (int $ports.admin))
  "admin_http" (printf "%s:%d" $router.adminHost (int $ports.adminHttp))
  "metrics" (printf "0.0.0.0:%d" (int $ports.metrics))
  "health" (printf "0.0.0.0:%d" (int $ports.health))
  "tracing" .Values.tracing
  "log_level" .Values.logLevel
  "timeouts" (dict "drain" $router.drain.timeout)
  "discovery" (dict "kind" "kubernetes" "kubernetes" (dict
    "objects" .Values.discovery.objects
    "selector" (include "millrace.selectorText" .)
    "namespace" .Release.Namespace)) -}}
{{- if ne .Values.tls.mode "off" -}}
{{- $_ := set $config "tls" (include "millrace.tlsConfig" . | fromYaml) -}}
{{- if .Values.tls.publicSecret -}}
{{- $_ := set $config "public_tls" (dict "cert" "/etc/millrace/public-tls/tls.crt" "key"
  "/etc/millrace/public-tls/tls.key") -}}
{{- end -}}
{{- end -}}
{{- with .Values.apiKeys.secretName -}}
{{- $_ := set $config "api_keys" (printf "/etc/millrace/keys/%s" $.Values.apiKeys.key) -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy $router.config) $config | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) */}}
{{- define "millrace.workerConfig" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $config := dict
  "role" $pool.role
  "host" "0.0.0.0"
  "grpc_port" $pool.ports.grpc
  "metrics_port" $pool.ports.metrics
  "health_port" $pool.ports.health
  "model" (include "millrace.modelPath" $root)
  "served_name" $root.Values.model.name
  "dp" $pool.dp
  "tp" $pool.tp
  "device" (ternary "cuda" "cpu" (gt (int $pool.gpus) 0))
  "launcher" (ternary "ray" "local" (gt (int $pool.size) 1))
  "cache_dir" (printf "/var/cache/millrace/%s" (include "millrace.cacheKey" $root))
  "tracing" $root.Values.tracing
  "log_level" $root.Values.logLevel
  "timeouts" (dict "drain" $pool.drain.timeout) -}}
{{- if ne $root.Values.tls.mode "off" -}}
{{- $_ := set $config "tls" (include "millrace.tlsConfig" $root | fromYaml) -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy $pool.config) $config | toYaml -}}
{{- end -}}

{{/* A folder per image: what one version has compiled does not fit the next */}}
{{- define "millrace.cacheKey" -}}
{{- $image := .Values.images.worker -}}
{{- default (default .Chart.AppVersion $image.tag) (trimPrefix "sha256:" $image.digest | trunc 12) -}}
{{- end -}}
