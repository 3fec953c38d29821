{{/* The configuration files of routers and workers. Their models refuse unknown keys; the tests load every one. */}}

{{- define "millrace.tlsConfig" -}}
cert: /etc/millrace/tls/tls.crt
key: /etc/millrace/tls/tls.key
ca: /etc/millrace/tls/ca.crt
require_client_cert: true
server_name: {{ index (include "millrace.peers" . | fromYaml).worker 0 }}
peers:
  {{- include "millrace.peers" . | nindent 2 }}
{{- end -}}

{{/* All addresses of the pod */}}
{{- define "millrace.anyAddress" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end -}}

{{- define "millrace.selectorText" -}}
app.kubernetes.io/name={{ include "millrace.name" . }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component in (prefill,decode,unified,flexible)
{{- end -}}

{{- define "millrace.routerConfig" -}}
{{- $router := .Values.router -}}
{{- $ports := $router.ports -}}
{{- $any := include "millrace.anyAddress" . -}}
{{- $config := dict
  "model" (include "millrace.modelPath" .Values.model)
  "grpc" (printf "%s:%d" $any (int $ports.grpc))
  "http" (printf "%s:%d" $any (int $ports.http))
  "admin" (printf "%s:%d" $router.adminHost (int $ports.admin))
  "admin_http" (printf "%s:%d" $router.adminHost (int $ports.adminHttp))
  "metrics" (printf "%s:%d" $any (int $ports.metrics))
  "health" (printf "%s:%d" $any (int $ports.health))
  "tracing" (merge (dict "endpoint" (default "" .Values.tracing.endpoint)) .Values.tracing)
  "log_level" .Values.logLevel
  "timeouts" (dict "drain" $router.drain.timeout)
  "discovery" (dict "kind" "kubernetes" "kubernetes" (dict
    "objects" .Values.discovery.objects
    "selector" (include "millrace.selectorText" .)
    "namespace" .Release.Namespace)) -}}
{{- if ne .Values.tls.mode "off" -}}
{{- $_ := set $config "tls" (include "millrace.tlsConfig" . | fromYaml) -}}
{{- if or .Values.tls.publicSecret (eq .Values.tls.mode "generated") -}}
{{- $folder := ternary "/etc/millrace/public-tls" "/etc/millrace/tls" (not (empty .Values.tls.publicSecret)) -}}
{{- $_ := set $config "public_tls" (dict "cert" (print $folder "/tls.crt") "key" (print $folder "/tls.key")) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "secret" (printf "/etc/millrace/secret/%s" .Values.secret.key) -}}
{{- with .Values.apiKeys.secretName -}}
{{- $_ := set $config "api_keys" (printf "/etc/millrace/keys/%s" $.Values.apiKeys.key) -}}
{{- $_ := set $config "api_keys_plaintext" $.Values.apiKeys.allowPlaintext -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy (default dict $router.config)) $config | toYaml -}}
{{- end -}}

{{- define "millrace.routerFiles" -}}
config.yaml: |
  {{- include "millrace.routerConfig" . | nindent 2 }}
preflight.py: |
  {{- .Files.Get "files/preflight.py" | nindent 2 }}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) */}}
{{- define "millrace.workerFiles" -}}
config.yaml: |
  {{- include "millrace.workerConfig" . | nindent 2 }}
preflight.py: |
  {{- .root.Files.Get "files/preflight.py" | nindent 2 }}
start.sh: |
  {{- .root.Files.Get "files/start.sh" | nindent 2 }}
{{- end -}}

{{/* The same of the job that warms a cache. It serves nobody, and runs before the release's Secrets are there: no port is open
     to other pods, and no page is kept */}}
{{- define "millrace.warmConfig" -}}
{{- $config := include "millrace.workerConfig" . | fromYaml -}}
{{- $limits := omit (default dict $config.limits) "disk_cache" -}}
{{- merge (dict "host" "127.0.0.1" "limits" $limits) (omit $config "secret" "tls" "limits") | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) */}}
{{- define "millrace.workerConfig" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $config := dict
  "role" $pool.role
  "host" (include "millrace.anyAddress" $root)
  "grpc_port" $pool.ports.grpc
  "metrics_port" $pool.ports.metrics
  "health_port" $pool.ports.health
  "model" $pool.modelPath
  "served_name" $pool.model.name
  "dp" $pool.dp
  "tp" $pool.tp
  "device" (ternary "cuda" "cpu" (gt (int $pool.gpus) 0))
  "launcher" (ternary "ray" "local" (gt (int $pool.size) 1))
  "secret" (printf "/etc/millrace/secret/%s" $root.Values.secret.key)
  "cache_dir" (include "millrace.cacheDir" $pool)
  "tracing" (merge (dict "endpoint" (default "" $root.Values.tracing.endpoint)) $root.Values.tracing)
  "log_level" $root.Values.logLevel
  "timeouts" (dict "drain" $pool.drain.timeout) -}}
{{- if ne $root.Values.tls.mode "off" -}}
{{- $_ := set $config "tls" (include "millrace.tlsConfig" $root | fromYaml) -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy $pool.config) $config | toYaml -}}
{{- end -}}
