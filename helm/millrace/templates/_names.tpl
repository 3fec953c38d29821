{{/* Names and labels. */}}

{{- define "millrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "millrace.fullname" -}}
{{- $name := include "millrace.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* (dict "root" $ "component" "router" "pool" "") -> what selects its pods */}}
{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ include "millrace.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
millrace/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/part-of: millrace
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of pods: nothing that changes with the chart's version, or an upgrade restarts everything */}}
{{- define "millrace.podLabels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/part-of: millrace
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of every worker pod, whatever its role */}}
{{- define "millrace.workerExpressions" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "millrace.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode, unified]}
{{- end -}}

{{- define "millrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (printf "%s-router" (include "millrace.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.router) */}}
{{- define "millrace.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{/* Pools with workerDefaults filled in, by name, as JSON: {"prefill": {...}}. A pool that is null is none, so that a
     file of values can take one away. */}}
{{- define "millrace.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- if not (kindIs "invalid" $own) -}}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy $own) -}}
{{- $_ := set $pool "name" $name -}}
{{- $_ := set $pool "role" (default $name $pool.role) -}}
{{- $_ := set $pool "fullname" (printf "%s-%s" (include "millrace.fullname" $) $name) -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Folder of the checkpoint in a container */}}
{{- define "millrace.modelPath" -}}
{{- if eq .Values.model.source "image" -}}
{{ .Values.model.path }}
{{- else -}}
/models{{ if .Values.model.path }}/{{ trimPrefix "/" .Values.model.path }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "millrace.downloads" -}}
{{- if has .Values.model.source (list "hf" "s3" "oci") }}true{{ end -}}
{{- end -}}

{{- define "millrace.modelVolume" -}}
{{- if eq .Values.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ .Values.model.hostPath | quote }}, type: Directory}
{{- else if ne .Values.model.source "image" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "millrace.modelMount" -}}
{{- if ne .Values.model.source "image" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "worker") -> name of its secret with certificates; empty without TLS */}}
{{- define "millrace.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "certManager" -}}
{{ include "millrace.fullname" .root }}-{{ .component }}-tls
{{- else if eq .root.Values.tls.mode "secrets" -}}
{{ index .root.Values.tls (printf "%sSecret" .component) }}
{{- end -}}
{{- end -}}

{{/* The name in every worker's certificate */}}
{{- define "millrace.workerName" -}}
{{ include "millrace.fullname" . }}-workers
{{- end -}}
