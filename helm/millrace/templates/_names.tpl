{{/* Names, labels and images. */}}

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

{{/* (dict "root" $ "component" "router" "pool" "" "name" NAME "labels" {...} "annotations" {...}) -> the metadata of an
     object. Only root, component and name are required; its own labels and annotations win over those of all objects. */}}
{{- define "millrace.meta" -}}
{{- $fixed := include "millrace.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/part-of" "millrace" -}}
{{- $_ := set $fixed "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $fixed "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $fixed "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) -}}
name: {{ .name }}
labels:
  {{- merge $fixed (default dict .labels) .root.Values.labels | toYaml | nindent 2 }}
{{- with merge dict (default dict .annotations) .root.Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The same of a pod template: nothing in it changes with the chart's version, or an upgrade would restart everything */}}
{{- define "millrace.podMeta" -}}
{{- $fixed := include "millrace.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/part-of" "millrace" -}}
labels:
  {{- merge $fixed (default dict .labels) .root.Values.labels | toYaml | nindent 2 }}
{{- with merge dict (default dict .annotations) .root.Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The Secret from which routers make the salts of tenants; the chart makes it unless one is given */}}
{{- define "millrace.deploymentSecret" -}}
{{- default (printf "%s-secret" (include "millrace.fullname" .)) .Values.secret.secretName -}}
{{- end -}}

{{/* (dict "root" $ "component" "router" "name" NAME "key" KEY) -> a Secret with 48 random characters. The one that is
     there stays. Rendered without a cluster, there is none, and the text is new every time. */}}
{{- define "millrace.randomSecret" -}}
{{- $known := default dict (lookup "v1" "Secret" .root.Release.Namespace .name).data -}}
apiVersion: v1
kind: Secret
metadata:
  {{- include "millrace.meta" . | nindent 2 }}
type: Opaque
data:
  {{ .key }}: {{ default (randAlphaNum 48 | b64enc) (index $known .key) }}
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

{{/* (dict "root" $ "which" "worker" "own" {...}) -> an image as JSON {"reference", "version", "pullPolicy"}. `own`: what is
     different from images.WHICH. */}}
{{- define "millrace.image" -}}
{{- $image := mustMergeOverwrite (deepCopy (index .root.Values.images .which)) (default dict .own) -}}
{{- $suffix := get (dict "worker" "-cpu" "gpuWorker" "-cuda13") .which -}}
{{- $tag := default (print .root.Chart.AppVersion $suffix) $image.tag -}}
{{- $repository := $image.repository -}}
{{- if and .root.Values.images.registry (ne .which "download") -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) $repository -}}
{{- end -}}
{{- dict
  "reference" (ternary (printf "%s@%s" $repository $image.digest) (printf "%s:%s" $repository $tag) (ne $image.digest ""))
  "version" (ternary (trimPrefix "sha256:" $image.digest | trunc 12) $tag (ne $image.digest ""))
  "pullPolicy" $image.pullPolicy
  | toJson -}}
{{- end -}}

{{/* The name in every worker's certificate */}}
{{- define "millrace.workerName" -}}
{{ include "millrace.fullname" . }}-workers
{{- end -}}

{{/* (dict "root" $ "component" "worker") -> name of its secret with certificates; empty without TLS */}}
{{- define "millrace.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "certManager" -}}
{{ include "millrace.fullname" .root }}-{{ .component }}-tls
{{- else if eq .root.Values.tls.mode "secrets" -}}
{{ index .root.Values.tls (printf "%sSecret" .component) }}
{{- end -}}
{{- end -}}
