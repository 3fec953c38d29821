{{/* Names, labels and images. */}}

{{- define "millrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimAll "-." -}}
{{- end -}}

{{- define "millrace.fullname" -}}
{{- $name := include "millrace.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimAll "-" -}}
{{- end -}}

{{/* (dict "root" $ "component" "router" "pool" "") -> what selects its pods */}}
{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ include "millrace.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
millrace/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "router" "pool" "" "name" NAME "labels" {...} "annotations" {...}) -> the metadata of an
     object. Only root, component and name are required; its own labels and annotations win over those of all objects. */}}
{{- define "millrace.meta" -}}
{{- $fixed := include "millrace.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/part-of" "millrace" -}}
{{- $_ := set $fixed "app.kubernetes.io/version" (.root.Chart.AppVersion | replace "+" "_") -}}
{{- $_ := set $fixed "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $fixed "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
name: {{ .name | quote }}
labels:
  {{- merge $fixed (default dict .labels) (default dict .root.Values.labels) | toYaml | nindent 2 }}
{{- with merge dict (default dict .annotations) (default dict .root.Values.annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The same of a pod template: nothing in it changes with the chart's version, or an upgrade would restart everything */}}
{{- define "millrace.podMeta" -}}
{{- $fixed := include "millrace.selector" . | fromYaml -}}
{{- $_ := set $fixed "app.kubernetes.io/part-of" "millrace" -}}
labels:
  {{- merge $fixed (default dict .labels) (default dict .root.Values.labels) | toYaml | nindent 2 }}
{{- with merge dict (default dict .annotations) (default dict .root.Values.annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The Secret from which routers make the salts of tenants; the chart makes it unless one is given */}}
{{- define "millrace.deploymentSecret" -}}
{{- default (printf "%s-secret" (include "millrace.fullname" .)) .Values.secret.secretName -}}
{{- end -}}

{{/* (dict "root" $ "name" NAME) -> the data of the Secret of that name as JSON; {} where there is none */}}
{{- define "millrace.known" -}}
{{- default dict (lookup "v1" "Secret" .root.Release.Namespace .name).data | toJson -}}
{{- end -}}

{{/* (dict "root" $ "component" "router" "name" NAME "key" KEY) -> a Secret with 48 random characters. The one that is
     there stays. Rendered without a cluster, there is none, and the text is new every time. */}}
{{- define "millrace.randomSecret" -}}
{{- $known := include "millrace.known" . | fromJson -}}
apiVersion: v1
kind: Secret
metadata:
  {{- include "millrace.meta" . | nindent 2 }}
type: Opaque
data:
  {{ .key | quote }}: {{ default (randAlphaNum 48 | b64enc) (index $known .key) }}
{{- end -}}

{{/* (dict "root" $ "name" NAME "cert" PEM "key" PEM "ca" PEM) -> a Secret as cert-manager makes it */}}
{{- define "millrace.certificate" }}
apiVersion: v1
kind: Secret
metadata:
  {{- include "millrace.meta" (merge (dict "component" "tls") .) | nindent 2 }}
type: kubernetes.io/tls
data:
  tls.crt: {{ b64enc .cert }}
  tls.key: {{ b64enc .key }}
  ca.crt: {{ b64enc .ca }}
{{- end -}}

{{/* (dict "name" NAME "files" TEXT) -> the name of a ConfigMap with these files. Other files have another name, so a pod of
     an older revision that starts again finds its own. */}}
{{- define "millrace.filesName" -}}
{{- printf "%s-%s" .name (sha256sum .files | trunc 10) -}}
{{- end -}}

{{/* What millrace.meta takes, with "files" TEXT, a map as YAML -> a ConfigMap of millrace.filesName. It is a hook, so that it
     outlives its revision, whose pods may need it. With the policy "keep" it would too, but no rollback would take it. */}}
{{- define "millrace.files" -}}
{{- $annotations := dict "helm.sh/hook" "pre-install,pre-upgrade,pre-rollback" "helm.sh/hook-weight" "-10"
  "helm.sh/hook-delete-policy" "before-hook-creation" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "millrace.meta" (merge (dict "name" (include "millrace.filesName" .) "annotations" $annotations "labels" (dict
    "millrace/files" .name)) .) | nindent 2 }}
immutable: true
data:
  {{- .files | nindent 2 }}
{{- end -}}

{{/* Labels of every worker pod, whatever its role */}}
{{- define "millrace.workerExpressions" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "millrace.name" . | quote }}
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode, unified, flexible]}
{{- end -}}

{{- define "millrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (printf "%s-router" (include "millrace.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "registry" "a.b" "repository" "c/d") -> a.b/c/d, or the repository alone where it names its registry */}}
{{- define "millrace.repository" -}}
{{- if and .registry (not (regexMatch "^([^/]*[.:][^/]*|localhost)/" .repository)) -}}
{{- trimSuffix "/" .registry }}/
{{- end -}}
{{- .repository -}}
{{- end -}}

{{/* (dict "root" $ "which" "worker" "own" {...}) -> an image as JSON {"reference", "version", "pullPolicy"}. `own`: what is
     different from images.WHICH. */}}
{{- define "millrace.image" -}}
{{- $image := mustMergeOverwrite (deepCopy (index .root.Values.images .which)) (default dict .own) -}}
{{- $_ := set $image "digest" (default "" $image.digest) -}}
{{- $suffix := get (dict "worker" "-cpu" "gpuWorker" "-cuda13") .which -}}
{{- $tag := default (print .root.Chart.AppVersion $suffix) $image.tag -}}
{{- $repository := include "millrace.repository" (dict "registry" .root.Values.images.registry "repository" $image.repository) -}}
{{- dict
  "reference" (ternary (printf "%s@%s" $repository $image.digest) (printf "%s:%s" $repository $tag) (ne $image.digest ""))
  "version" (ternary (trimPrefix "sha256:" $image.digest | trunc 12) $tag (ne $image.digest ""))
  "pullPolicy" $image.pullPolicy
  | toJson -}}
{{- end -}}

{{/* (dict "root" $ "model" {...}) -> the image of the job that downloads it, in the same form. A copy of the usual client, which
     keeps its path in another registry, has the same tags. */}}
{{- define "millrace.downloadImage" -}}
{{- $own := .root.Values.images.download -}}
{{- $usual := get (dict
  "s3" (dict "registry" "docker.io" "repository" "amazon/aws-cli" "tag" "2.27.50")
  "oci" (dict "registry" "ghcr.io" "repository" "oras-project/oras" "tag" "v1.2.3")) .model.source -}}
{{- if and (not $usual) (not $own.repository) -}}
{{- include "millrace.image" (dict "root" .root "which" "router") -}}
{{- else -}}
{{- $usual = default .root.Values.images.router $usual -}}
{{- $repository := default $usual.repository $own.repository -}}
{{- $known := hasSuffix (print "/" $usual.repository) (print "/" $repository) -}}
{{- if not (or $known $own.tag $own.digest) -}}
{{- fail (printf "images.download.tag: required with the repository %s, which is not %s" $repository $usual.repository) -}}
{{- end -}}
{{- if and $known $usual.registry (not .root.Values.images.registry) -}}
{{- $repository = include "millrace.repository" (dict "registry" $usual.registry "repository" $repository) -}}
{{- end -}}
{{- include "millrace.image" (dict "root" .root "which" "download" "own" (dict "repository" $repository "tag" (default
  $usual.tag $own.tag))) -}}
{{- end -}}
{{- end -}}

{{/* Of each role, the name that only its certificate has, in a cluster: `tls.peers` */}}
{{- define "millrace.peers" -}}
{{- range $role, $suffix := dict "router" "router" "worker" "workers" "admin" "admin" }}
{{ $role }}: [{{ include "millrace.fullname" $ }}-{{ $suffix }}.{{ $.Release.Namespace }}.svc]
{{- end }}
{{- end -}}

{{/* All names in each role's certificate */}}
{{- define "millrace.dnsNames" -}}
{{- $names := include "millrace.peers" . | fromYaml -}}
{{- $router := list "localhost" -}}
{{- range $service := list "router" "router-pods" -}}
{{- range $rest := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) -}}
{{- $router = append $router (printf "%s-%s%s" (include "millrace.fullname" $) $service $rest) -}}
{{- end -}}
{{- end -}}
{{- set $names "router" $router | toJson -}}
{{- end -}}

{{/* (dict "root" $ "component" "worker") -> name of its secret with certificates; empty without TLS */}}
{{- define "millrace.tlsSecret" -}}
{{- if has .root.Values.tls.mode (list "generated" "certManager") -}}
{{ include "millrace.fullname" .root }}-{{ .component }}-tls
{{- else if eq .root.Values.tls.mode "secrets" -}}
{{ index .root.Values.tls (printf "%sSecret" .component) }}
{{- end -}}
{{- end -}}
