{{/* Parts of pods that routers and workers share. */}}

{{/* (dict "root" $ "asRoot" false): without numbers, admission gives the pod those of its namespace, as on OpenShift */}}
{{- define "millrace.podSecurity" -}}
{{- $security := .root.Values.podSecurity -}}
{{- $user := ternary 0 $security.runAsUser (default false .asRoot) -}}
runAsNonRoot: {{ not .asRoot }}
{{- if not (kindIs "invalid" $user) }}
runAsUser: {{ int $user }}
runAsGroup: {{ int $user }}
{{- end }}
{{- with $security.fsGroup }}
fsGroup: {{ int . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {{ toJson $security.seccompProfile }}
{{- end -}}

{{- define "millrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* (dict "port" 9091 "startup" 60 "startupService" "liveness"): of grpc.health.v1 on the plain health port. `liveness` is
     the process alone: a busy device or a lost peer restarts no container. Readiness is the empty service name. */}}
{{- define "millrace.probes" -}}
startupProbe:
  grpc: {port: {{ int .port }}, service: {{ .startupService | quote }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add (int .startup) 4) 5 }}
livenessProbe:
  grpc: {port: {{ int .port }}, service: liveness}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
readinessProbe:
  grpc: {port: {{ int .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{/* A value as text. Helm keeps numbers as floats, and a large one would be 1.6777216e+07. */}}
{{- define "millrace.text" -}}
{{- ternary . (toJson .) (kindIs "string" .) -}}
{{- end -}}

{{/* (dict "at" "router" "own" TEXT "env" {...}) -> entries of a container's env: a map is a valueFrom, everything else a
     value. `own`: the chart's entries, none of which may be there twice. */}}
{{- define "millrace.env" -}}
{{- $own := list }}
{{- range .own | fromYamlArray }}{{- $own = append $own .name }}{{- end }}
{{- $taken := list }}
{{- range $name := keys (default dict .env) | sortAlpha }}{{- if has $name $own }}{{- $taken = append $taken $name }}{{- end }}{{- end }}
{{- with $taken }}{{- fail (printf "%s.env.%s: the chart sets this variable itself" $.at (join ", " .)) }}{{- end }}
{{- range $name, $value := .env }}
{{- if kindIs "map" $value }}
- {name: {{ $name | quote }}, valueFrom: {{ toJson $value }}}
{{- else }}
- {name: {{ $name | quote }}, value: {{ include "millrace.text" $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.ownEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: MILLRACE_RUN, value: /run/millrace}
{{- end -}}

{{- define "millrace.routerEnv" -}}
{{- include "millrace.ownEnv" . }}
{{- if ne .Values.tls.mode "off" }}
{{- range $option, $file := dict "CA" "ca.crt" "CERT" "tls.crt" "KEY" "tls.key" }}
- {name: MILLRACE_TLS_{{ $option }}, value: /etc/millrace/tls/{{ $file }}} # of the commands in this pod
{{- end }}
{{- end }}
- {name: MILLRACE_SECRET_FILE, value: /etc/millrace/secret/{{ .Values.secret.key }}}
{{- end -}}

{{/* (dict "root" $ "values" ROUTER-OR-POOL "grace" 120 "serviceAccount" "") -> what stands at the top of a pod's spec */}}
{{- define "millrace.podHead" -}}
terminationGracePeriodSeconds: {{ int .grace }}
{{- with .serviceAccount }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- if .values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with default (ternary "ClusterFirstWithHostNet" "" .values.hostNetwork) .values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .values.resourceClaims }}
resourceClaims: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* ROUTER-OR-POOL -> {"claims": [...]}, the DRA claims of its main container; {} without any */}}
{{- define "millrace.claims" -}}
{{- $claims := list -}}
{{- range .resourceClaims -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- ternary (dict "claims" $claims) dict (gt (len $claims) 0) | toJson -}}
{{- end -}}

{{/* (dict "root" $ "scheduling" {...} "component" "router" "pool" "" "affinity" {...} "tolerations" [...]): `affinity` and
     `tolerations` are the chart's own. What is required or preferred of a kind of affinity replaces the chart's,
     an empty kind takes it away, tolerations are added */}}
{{- define "millrace.scheduling" -}}
{{- with .scheduling.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with concat (default list .tolerations) (default list .scheduling.tolerations) }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .scheduling.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .scheduling.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .scheduling.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- $selector := include "millrace.selector" . | fromYaml }}
{{- with .scheduling.spread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . | quote }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ toJson $selector }}}
  {{- end }}
{{- end }}
{{- $affinity := deepCopy (default dict .affinity) }}
{{- range $kind, $own := .scheduling.affinity }}
{{- $made := default dict (get $affinity $kind) }}
{{- range $when, $terms := $own }}{{- $_ := set $made $when $terms }}{{- end }}
{{- $_ := set $affinity $kind $made }}
{{- if not $own }}{{- $_ := unset $affinity $kind }}{{- end }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "image" {...} "model" {...} "args" [...] "security" TEXT "resources" {...} "env" TEXT "mounts" TEXT): waits in
     here until the pod can work. `env`: what the main container has, so that the preflight overrides nothing of it */}}
{{- define "millrace.preflight" -}}
- name: preflight
  image: {{ .image.reference }}
  imagePullPolicy: {{ .image.pullPolicy }}
  command: [python3, /etc/millrace/config/preflight.py, --model, {{ include "millrace.modelPath" .model | quote }}]
  args: {{ toJson .args }}
  {{- with .env }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .envFrom }}
  envFrom: {{ toJson . }}
  {{- end }}
  securityContext:
    {{- .security | nindent 4 }}
  resources: {{ toJson .resources }}
  volumeMounts:
    - {name: config, mountPath: /etc/millrace/config, readOnly: true}
    - {name: run, mountPath: /run/millrace}
    {{- include "millrace.modelMount" .model | nindent 4 }}
    {{- with .mounts }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* (dict "root" $ "values" ROUTER-OR-POOL "apiVersion" "apps/v1" "kind" "Deployment" "name" NAME) -> the number of pods, also
     with an autoscaler: a field that an upgrade takes away falls back to one pod, whatever number runs */}}
{{- define "millrace.replicas" -}}
{{- $scaling := .values.autoscaling -}}
{{- if eq $scaling.kind "none" -}}
{{- int .values.replicas -}}
{{- else -}}
{{- $live := lookup .apiVersion .kind .root.Release.Namespace .name | dig "spec" "replicas" 0 | int -}}
{{- max $live (int $scaling.minReplicas) -}}
{{- end -}}
{{- end -}}

{{/* What millrace.meta takes, with "values" ROUTER-OR-POOL: a PodDisruptionBudget, where more than one pod can be. Pods that are not ready may
     always be evicted: one that loads for half an hour would stop the drain of its node. */}}
{{- define "millrace.pdb" -}}
{{- $several := or (ne .values.autoscaling.kind "none") (gt (default 0 .values.replicas | int) 1) -}}
{{- if and .values.pdb.enabled $several }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "millrace.meta" . | nindent 2 }}
spec:
  maxUnavailable: {{ include "millrace.text" .values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "millrace.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
